/* direct_rows.cu - kernels of direct_rows.cuh. */
#include "direct.cuh"
#include "direct_rows.cuh"

namespace kvant
{

template <int D> static DirectKernel kernel_of(const kvant_general &g)
{
    return g.view.raw == 1 ? direct_kernel_of<RawRows<D, false>>() : direct_kernel_of<RawRows<D, true>>();
}

DirectKernel direct_rows(const kvant_general &g)
{
    switch (g.view.raw == 0 ? 0 : g.head_dim) {
    case 64: return kernel_of<64>(g);
    case 80: return kernel_of<80>(g);
    case 96: return kernel_of<96>(g);
    case 112: return kernel_of<112>(g);
    case 128: return kernel_of<128>(g);
    default: return DirectKernel{};
    }
}

} // namespace kvant
