/* direct_sketch.cu - kernels of direct_sketch.cuh. */
#include "direct.cuh"
#include "direct_sketch.cuh"

namespace kvant
{

template <int D> static DirectKernel kernel_of(const kvant_general &g)
{
    switch (g.view.kind == KVANT_GENERAL_SKETCH ? 0 : g.view.books[0].bits) {
    case 0: return direct_kernel_of<SketchedCodes<D, 0>>();
    case 1: return direct_kernel_of<SketchedCodes<D, 1>>();
    case 2: return direct_kernel_of<SketchedCodes<D, 2>>();
    case 3: return direct_kernel_of<SketchedCodes<D, 3>>();
    default: return DirectKernel{};
    }
}

DirectKernel direct_sketch(const kvant_general &g)
{
    return g.head_dim == 64 ? kernel_of<64>(g) : kernel_of<128>(g);
}

} // namespace kvant
