/* direct_tiers.cu - kernels of direct_tiers.cuh. */
#include "direct.cuh"
#include "direct_tiers.cuh"

namespace kvant
{

template <int D> static DirectKernel kernel_of(const kvant_general &g)
{
    return g.view.books[1].bits == 2 ? direct_kernel_of<TieredCodes<D, 2>>()
                                     : direct_kernel_of<TieredCodes<D, 3>>();
}

DirectKernel direct_tiers(const kvant_general &g)
{
    return g.head_dim == 64 ? kernel_of<64>(g) : kernel_of<128>(g);
}

} // namespace kvant
