/* any.h - kernels for problems that all other kernels do not know at compile time. They serve every
 * head_dim that is a multiple of 16, at most 512, and groups of any size. Their form is simple: a
 * warp processes a row. Attention also serves pairs of codecs for which other kernels lack shared
 * memory. */
#pragma once

#include "../attention/attention.h"
#include "../encode/append.h"

namespace kvant
{

/* Appends rows, or open pages, of role 0 to open pages, codebook pages and trellis pages. */
cudaError_t launch_append_any(const AppendArgs &args, int n_kv_heads, cudaStream_t stream);

/* The same for all other pages, by the general form. */
kvant_status launch_general(const AppendArgs &args, int n_kv_heads, cudaStream_t stream);

/* Whether its kernels are faster than tile kernels for a pair without a decode kernel. rows: query
 * rows per kv head. */
bool prefers_any(const kvant_cuda_kernel_attention_args &args, uint32_t rows);

/* KVANT_ERR_UNSUPPORTED when a thread block has less shared memory than this head_dim needs.
 * common: the same as for tile kernels. */
kvant_status launch_attention_any(const kvant_cuda_kernel_attention_args &args,
                                  const AttentionArgs &common, int multiprocessors,
                                  int shared_bytes, cudaStream_t stream);

} // namespace kvant
