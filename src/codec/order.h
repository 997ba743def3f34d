/* order.h - order= of a spec: the order in which chunks and groups take the channels of a key.
 *
 * RoPE rotates channels in pairs. Files of Llama-type models store both channels of a pair side by
 * side. The papers' models store the first channels of all pairs and then the second ones (halves).
 * order.c owns the permutations. The transform applies a permutation as its W. */
#pragma once

#include "codec_internal.h"

/* Channel i of the ordered row is channel from[i] of the stored row. */
void kvant_order_channels(kvant_order order, uint32_t head_dim, uint16_t *from);

/* Gives a codec of keys the order that the options name. Values keep theirs, because RoPE does not
 * rotate values. KVANT_ERR_SPEC next to transform=, KVANT_ERR_MEMORY. */
kvant_status kvant_codec_set_order(kvant_codec *codec, const kvant_common *common,
                                   const kvant_error *error);
