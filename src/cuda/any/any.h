/* any.h - kernels for what the others do not know when they are compiled: every head_dim that is a
 * multiple of 16, at most 512, and groups of any size. In plain form: a warp takes a row; attention
 * takes the pairs of codecs for which shared memory has no room otherwise, too. */
#pragma once

#include "../attention/attention.h"
#include "../encode/append.h"

namespace kvant
{

/* Rows, or open pages, of role 0 into open pages, codebooks' and trellises'. */
cudaError_t launch_append_any(const AppendArgs &args, int n_kv_heads, cudaStream_t stream);

/* The same into all other pages: by the general form. */
kvant_status launch_general(const AppendArgs &args, int n_kv_heads, cudaStream_t stream);

/* Whether its kernels are faster than tile kernels for a pair without a decode kernel. rows: of
 * queries, per kv head. */
bool prefers_any(const kvant_cuda_kernel_attention_args &args, uint32_t rows);

/* KVANT_ERR_UNSUPPORTED when a block has less shared memory than this head_dim needs. common: as
 * for tile kernels. */
kvant_status launch_attention_any(const kvant_cuda_kernel_attention_args &args,
                                  const AttentionArgs &common, int multiprocessors,
                                  int shared_bytes, cudaStream_t stream);

} // namespace kvant
