/* append_rows.cuh - the rows of an append or a seal of any head_dim: a warp loads one and
 * transforms it. */
#pragma once

#include "rows.cuh"

#include "../encode/append_tokens.cuh"

namespace kvant
{

struct AnyAppendArgs : AppendArgs {
    /* the codec of the only role; the role's params may lack its transform */
    kvant_cuda_codec codec;
};

/* Loads and transforms row `token` of the call. finite: whether the row was finite before the
 * transform. space: P floats of the warp's memory. */
template <int P>
KVANT_INLINE Row<P> load_transformed(const AnyAppendArgs &args, uint32_t token, int kv_head,
                                     float *space, int lane, bool &finite)
{
    const AppendRole &role = args.roles[0];
    const int d = (int)role.codec.head_dim;
    const size_t at = args.from ? kv_head * role.row_head_stride +
                                      args.from[token / PAGE_TOKENS] * role.row_block_stride +
                                      token % PAGE_TOKENS * role.token_stride
                                : token * role.token_stride + kv_head * role.row_head_stride;
    Row<P> row = load_any<P>(role.rows, at, args.type, d, lane);
    bool own = true;
    each_of(row, d, lane, [&](float &x, int channel) {
        x = centered(x, role, kv_head * d + channel);
        own &= is_finite(x);
    });
    finite = __all_sync(FULL, own);
    transform_any(row, role.codec, args.codec.any,
                  key_transform_of(role.codec, role.key_transform, kv_head), space, lane);
    rotate(row, role.after, lane);
    return row;
}

} // namespace kvant
