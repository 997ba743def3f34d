/* attention_codebook4.cu - the attention kernels of one kind of code, in a file of their own so that kinds
 * compile side by side. */
#include "attention.cuh"

namespace kvant
{

AttentionKernel codebook4_attention(uint32_t head_dim, bool large)
{
    return choose_attention_kernel<Codebook4>(head_dim, large);
}

} // namespace kvant
