/* turn.c - see turn.h. */
#include "turn.h"

#include <math.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/error.h"
#include "judge.h"

#define MOST_FREQUENCY 1024.0f /* angles of 2^32 positions stay exact enough in binary64 */

static kvant_status check(const kvant_rope *rope, uint32_t head_dim)
{
    if (!rope->frequencies || !rope->n_dims || rope->n_dims % 2 || rope->n_dims > head_dim)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "rope: frequencies are missing, or n_dims is odd, 0 or above head_dim");
    for (uint32_t i = 0; i < rope->n_dims / 2; i++) {
        KVANT_RETURN_IF(!isfinite(rope->frequencies[i]), KVANT_ERR_NONFINITE);
        KVANT_RETURN_IF(fabsf(rope->frequencies[i]) > MOST_FREQUENCY, KVANT_ERR_ARGUMENT);
    }
    return KVANT_OK;
}

static void fill(kvant_turn *turn, const kvant_rope *rope, uint32_t n_slots)
{
    *turn = (kvant_turn){ .n_dims = rope->n_dims,
                          .interleaved = rope->interleaved != 0,
                          .n_positions = rope->n_positions ? rope->n_positions : n_slots,
                          .n_ranges = rope->n_ranges };
    memcpy(turn->frequencies, rope->frequencies, rope->n_dims / 2 * sizeof *rope->frequencies);
}

kvant_status kvant_tensor_set_rope(kvant_tensor *tensor, const kvant_rope *rope)
{
    kvant_rope r;
    if (!tensor || (rope && !KVANT_TAKE(kvant_rope, &r, rope, n_ranges)))
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "rope: no tensor, or its size field is not set");
    if (rope)
        KVANT_FORWARD(check(&r, tensor->head_dim));
    kvant_learning *l = tensor->learning;
    if (!l || kvant_tensor_codec_info(tensor)->role == KVANT_ROLE_V)
        return KVANT_OK;
    const uint32_t blocks = tensor->blocks_per_sequence ? tensor->blocks_per_sequence : tensor->n_blocks;
    kvant_turn *turn = rope ? kvant_alloc(1, sizeof *turn) : NULL;
    KVANT_RETURN_IF(rope && !turn, KVANT_ERR_MEMORY);
    if (turn)
        fill(turn, &r, blocks * KVANT_PAGE_TOKENS);
    const bool same = l->turn && turn ? memcmp(l->turn, turn, sizeof *turn) == 0 : l->turn == turn;
    kvant_free(same ? turn : l->turn);
    l->turn = same ? l->turn : turn;
    return KVANT_OK;
}
