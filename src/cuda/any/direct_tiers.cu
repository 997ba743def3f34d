/* direct_tiers.cu - instantiates the kernels of direct.cuh. */
#include "direct.cuh"

namespace kvant
{

template <class F> static DirectKernel kernel_of()
{
    return DirectKernel{ (const void *)direct_kernel<F>, [](uint32_t k, uint32_t v, int warps) {
                            return direct_places<F>(k, v, warps).end;
                        } };
}

template <int D> static DirectKernel kernel_of(const kvant_general &g)
{
    return g.view.books[1].bits == 2 ? kernel_of<TieredCodes<D, 2>>()
                                     : kernel_of<TieredCodes<D, 3>>();
}

DirectKernel direct_tiers(const kvant_general &g)
{
    return g.head_dim == 64 ? kernel_of<64>(g) : kernel_of<128>(g);
}

} // namespace kvant
