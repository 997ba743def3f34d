/* direct_rows.cu - kernels of direct_rows.cuh. */
#include "direct.cuh"
#include "direct_rows.cuh"

namespace kvant
{

template <int D> static DirectKernel kernel_of(const kvant_general &g)
{
    return g.view.raw == 1 ? direct_kernel_of<RawRows<D, false>>()
                           : direct_kernel_of<RawRows<D, true>>();
}

DirectKernel direct_rows(const kvant_general &g)
{
    return g.head_dim == 64 ? kernel_of<64>(g) : kernel_of<128>(g);
}

} // namespace kvant
