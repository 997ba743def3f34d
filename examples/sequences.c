/* Sequences of a cache: RoPE, batches, a prefix that two sequences share, a block that leaves the
 * process and comes back.
 *
 *     cc sequences.c $(pkg-config --cflags --libs kvant) -lm -o sequences && ./sequences
 */
#include <kvant/cache.h>

#include <math.h>

#include "example.h"

enum { HEADS = 4, KV_HEADS = 2, DIM = 64, ROW = KV_HEADS * DIM, Q_ROW = HEADS * DIM, WINDOW = 128 };

static kvant_cache *make_cache(void)
{
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    kvant_cache *cache;
    params.n_layers = 1, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS;
    params.head_dim = DIM, params.max_tokens = 2048, params.max_sequences = 4;
    check(kvant_cache_create(&params, &cache));

    /* How RoPE rotates the keys of layer 0, so that a transform from early positions fits later
     * positions. */
    float frequencies[DIM / 2];
    for (int i = 0; i < DIM / 2; i++)
        frequencies[i] = powf(10000, -2.0f * (float)i / DIM);
    const kvant_rope rope = { .size = sizeof rope, .n_dims = DIM, .frequencies = frequencies };
    check(kvant_cache_set_rope(cache, 0, &rope));
    return cache;
}

/* Appends n tokens of a prompt to a sequence. Their queries come first, because keys learn best
 * from them. */
static void append_prompt(kvant_cache *cache, int32_t sequence, uint32_t n)
{
    float *k = random_numbers(n * ROW), *v = random_numbers(n * ROW),
          *q = random_numbers(n * Q_ROW);
    const kvant_queries queries = { .size = sizeof queries,
                                    .q = q,
                                    .token_stride = Q_ROW,
                                    .head_stride = DIM,
                                    .n_tokens = n,
                                    .n_heads = HEADS };
    if (kvant_cache_wants_queries(cache, 0, n))
        check(kvant_cache_note_queries(cache, 0, &queries));
    check(kvant_cache_append(cache, 0, sequence, k, v, n));
    free(k), free(v), free(q);
}

/* One more token of each sequence, and its attention. */
static void decode_batch(kvant_cache *cache, const int32_t *sequences, uint32_t n)
{
    float *k = random_numbers(n * ROW), *v = random_numbers(n * ROW),
          *q = random_numbers(n * Q_ROW);
    float *out = zeroed(n * Q_ROW * sizeof *out);
    check(kvant_cache_append_batch(cache, 0, sequences, n, k, v, 1));
    check(kvant_cache_attend_batch(cache, 0, sequences, n, q, out, 1));

    /* The same for the first of them, with a window over the newest tokens. */
    const kvant_attention_problem problem = { .size = sizeof problem,
                                              .n_queries = 1,
                                              .q = q,
                                              .q_token_stride = Q_ROW,
                                              .q_head_stride = DIM,
                                              .out = out,
                                              .out_token_stride = Q_ROW,
                                              .out_head_stride = DIM,
                                              .window = WINDOW,
                                              .causal = true };
    check(kvant_cache_attention(cache, 0, sequences[0], &problem));
    free(k), free(v), free(q), free(out);
}

/* Blocks 0 and 1 of one sequence begin a new sequence, as if a store had kept them. */
static int32_t restore(kvant_cache *cache, int32_t from)
{
    size_t bytes;
    check(kvant_sequence_export_size(cache, from, 0, 2, &bytes));
    void *data = zeroed(bytes);
    check(kvant_sequence_export(cache, from, 0, 2, data, bytes));
    const int32_t restored = kvant_sequence_create(cache);
    check(kvant_sequence_import(cache, restored, data, bytes));
    free(data);
    return restored;
}

int main(void)
{
    kvant_cache *cache = make_cache();
    int32_t both[2] = { kvant_sequence_create(cache), -1 };
    append_prompt(cache, both[0], 600);
    both[1] = kvant_sequence_fork(cache, both[0]); /* shares all blocks with the first */
    decode_batch(cache, both, 2);
    check(kvant_sequence_truncate(cache, both[1], 300)); /* forgets tokens 300 and later */

    const int32_t restored = restore(cache, both[0]);
    float *a = zeroed(64 * ROW * sizeof *a), *b = zeroed(64 * ROW * sizeof *b), v[64 * ROW];
    check(kvant_cache_read(cache, 0, both[0], 0, 64, a, v));
    check(kvant_cache_read(cache, 0, restored, 0, 64, b, v));
    kvant_cache_info info = { .size = sizeof info };
    check(kvant_cache_get_info(cache, &info));
    printf("lengths %u, %u, %u; restored rows are %s; %zu bytes\n",
           (unsigned)kvant_sequence_length(cache, both[0], 0),
           (unsigned)kvant_sequence_length(cache, both[1], 0),
           (unsigned)kvant_sequence_length(cache, restored, 0),
           memcmp(a, b, 64 * ROW * sizeof *a) == 0 ? "the same" : "different", info.bytes);
    check(kvant_sequence_drop(cache, both[0], 512)); /* what no window sees any more */
    kvant_sequence_free(cache, restored);
    kvant_cache_free(&cache);
    free(a), free(b);
    return 0;
}
