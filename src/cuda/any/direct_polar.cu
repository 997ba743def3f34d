/* direct_polar.cu - kernels of direct_polar.cuh. */
#include "direct.cuh"
#include "direct_polar.cuh"

namespace kvant
{

template <int D> static DirectKernel kernel_of(const kvant_general &g)
{
    switch (g.view.polar.bits) {
    case 2: return direct_kernel_of<PolarCodes<D, 2>>();
    case 3: return direct_kernel_of<PolarCodes<D, 3>>();
    default: return direct_kernel_of<PolarCodes<D, 4>>();
    }
}

DirectKernel direct_polar(const kvant_general &g)
{
    return g.head_dim == 64 ? kernel_of<64>(g) : kernel_of<128>(g);
}

} // namespace kvant
