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

DirectKernel direct_for(const AnyAttentionArgs &p)
{
    const kvant_general &k = p.keys.general, &v = p.values.general;
    const auto has_tiers = [](const kvant_cuda_codec &codec) {
        return codec.params.codes == KVANT_CUDA_CODES_GENERAL &&
               codec.general.view.kind == KVANT_GENERAL_TIERS;
    };
    const bool serves = !p.k_center && !p.page_offsets && !p.matrices && has_tiers(p.keys) &&
                        has_tiers(p.values) && k.view.books[1].bits == v.view.books[1].bits &&
                        (k.head_dim == 64 || k.head_dim == 128);
    return !serves ? DirectKernel{} : k.head_dim == 64 ? kernel_of<64>(k) : kernel_of<128>(k);
}

} // namespace kvant
