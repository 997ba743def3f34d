/* Tensors of an engine that manages blocks: RoPE and positions, queries to learn from, keys that
 * move to other positions, blocks that are copied, stored and looked at. slots.c is the beginning.
 *
 *     cc blocks.c $(pkg-config --cflags --libs kvant) -lm -o blocks && ./blocks
 */
#include <kvant/scheme.h>

#include <math.h>

#include "example.h"

enum { HEADS = 4, KV_HEADS = 2, DIM = 64, ROW = KV_HEADS * DIM, BLOCKS = 16, TOKENS = 512 };

static const kvant_scheme_location k_place = { .size = sizeof k_place,
                                               .role = KVANT_ROLE_K,
                                               .n_layers = 1,
                                               .n_kv_heads = KV_HEADS,
                                               .head_dim = DIM };
static int64_t slots[TOKENS]; /* token i is in slot i */
static int32_t positions[TOKENS];

/* Prints what a scheme stores a model with, and the memory that a tensor may take. */
static void print_scheme(kvant_scheme *scheme)
{
    const kvant_scheme_model model = {
        .size = sizeof model, .n_layers = 1, .n_kv_heads = KV_HEADS, .head_dim = { DIM, DIM }
    };
    const kvant_tensor_params params = { .size = sizeof params,
                                         .n_sequences = 1,
                                         .n_blocks = BLOCKS };
    kvant_scheme_info info = { .size = sizeof info };
    double bits;
    size_t bytes;
    uint32_t head_dim; /* of a settings file; a preset states none */
    check(kvant_scheme_get_info(scheme, &info));
    check(kvant_scheme_true_bits(scheme, &model, &bits));
    check(kvant_scheme_head_dim(scheme, 0, KVANT_ROLE_K, &head_dim));
    check(kvant_scheme_most_bytes(scheme, &k_place, ROW, &params, &bytes));
    printf("%s: keys %s, %.2f bits per number, at most %zu bytes, head_dim %u\n", info.preset,
           info.k, bits, bytes, (unsigned)head_dim);
}

static kvant_tensor *make_tensor(kvant_scheme *scheme, kvant_role role, void **memory)
{
    kvant_scheme_location place = k_place;
    kvant_exact_part exact = { .size = sizeof exact };
    kvant_tensor_params params = { .size = sizeof params,
                                   .n_kv_heads = KV_HEADS,
                                   .n_sequences = 1,
                                   .n_blocks = BLOCKS,
                                   .blocks_per_sequence = BLOCKS,
                                   .exact = &exact };
    kvant_tensor *tensor;
    size_t bytes;
    place.role = role;
    check(kvant_scheme_codecs(scheme, &place, &params.codecs));
    check(kvant_scheme_exact(scheme, BLOCKS * 64, 1, &exact));
    check(kvant_tensor_size(&params, &bytes));
    *memory = zeroed(bytes);
    check(kvant_tensor_create(&params, *memory, &tensor));
    return tensor;
}

static kvant_rope rope_of(float *frequencies)
{
    for (int i = 0; i < DIM / 2; i++)
        frequencies[i] = powf(10000, -2.0f * (float)i / DIM);
    return (kvant_rope){ .size = sizeof(kvant_rope), .n_dims = DIM, .frequencies = frequencies };
}

/* The keys and the values of a prompt: all rows of both are stored, or none. */
static void write_prompt(kvant_tensor *k, kvant_tensor *v)
{
    float *rows = random_numbers(TOKENS * ROW), *q = random_numbers(TOKENS * HEADS * DIM);
    const kvant_queries queries = { .size = sizeof queries,
                                    .q = q,
                                    .token_stride = HEADS * DIM,
                                    .head_stride = DIM,
                                    .n_tokens = TOKENS,
                                    .n_heads = HEADS,
                                    .positions = positions };
    if (kvant_tensor_wants_queries(k, TOKENS))
        check(kvant_tensor_note_queries(k, &queries, 1));
    check(kvant_tensor_next_positions(k, positions, TOKENS));
    check(kvant_tensor_write_layer(k, v, slots, TOKENS, rows, ROW, rows, ROW, 1));
    free(rows), free(q);
}

/* Block 1 as bytes in a store, and back in the place of block 9. */
static void store_block(kvant_tensor *k)
{
    const size_t most = kvant_tensor_export_size(k);
    size_t bytes;
    void *data = zeroed(most);
    check(kvant_tensor_export(k, 1, data, most, &bytes));
    check(kvant_tensor_import(k, 9, data, bytes));
    free(data);
}

/* The first kv head of a block: its state, and a codec with what the tensor has learned. */
static void print_block(const kvant_tensor *k, uint32_t block)
{
    static const char *const states[] = { "empty", "open", "a sink", "sealed" };
    kvant_block_info info = { .size = sizeof info };
    kvant_codec *codec;
    check(kvant_tensor_get_block(k, block, 0, &info));
    check(kvant_tensor_make_codec(k, block, 0, info.codec, &codec));
    printf("block %u is %s, transform %u\n", (unsigned)block, states[info.state],
           (unsigned)info.transform_id);
    kvant_codec_free(&codec);
}

/* A centre and a scale that the engine knows, in place of learned ones. */
static void set_affine(void)
{
    const kvant_scheme_params params = { .size = sizeof params, .k = "int-4:center=first" };
    float *center = random_numbers(ROW);
    kvant_scheme *scheme;
    void *memory;
    check(kvant_scheme_create(&params, &scheme));
    kvant_tensor *k = make_tensor(scheme, KVANT_ROLE_K, &memory);
    check(kvant_tensor_set_affine(k, &(kvant_affine){ .center = center }));
    kvant_tensor_free(&k);
    kvant_scheme_free(&scheme);
    free(memory), free(center);
}

int main(void)
{
    const kvant_scheme_params params = { .size = sizeof params, .preset = "balanced" };
    float frequencies[DIM / 2], before[ROW], after[ROW], pair[2 * ROW];
    kvant_scheme *scheme;
    void *k_memory, *v_memory;
    for (int32_t i = 0; i < TOKENS; i++)
        slots[i] = positions[i] = i;
    check(kvant_scheme_create(&params, &scheme));
    print_scheme(scheme);
    kvant_tensor *k = make_tensor(scheme, KVANT_ROLE_K, &k_memory);
    kvant_tensor *v = make_tensor(scheme, KVANT_ROLE_V, &v_memory);
    const kvant_rope rope = rope_of(frequencies);
    check(kvant_tensor_set_rope(k, &rope));
    write_prompt(k, v);
    print_block(k, 0);
    check(kvant_tensor_copy(k, 1, k, 8, 1)); /* block 8 becomes a copy of block 1 */
    store_block(k);
    check(kvant_tensor_read(k, 8 * 64, 1, before, ROW));
    check(kvant_tensor_read_slots(k, (const int64_t[]){ 9 * 64, 64 }, 2, pair, ROW, 1));

    int32_t by[BLOCKS * 64] = { 0 };
    by[8 * 64] = 5; /* as if the token of this slot had been 5 positions later */
    check(kvant_tensor_shift(k, &rope, by, BLOCKS * 64, 1));
    check(kvant_tensor_read(k, 8 * 64, 1, after, ROW));
    printf("copy, import and original are %s; the shifted key is %s\n",
           memcmp(before, pair, sizeof before) == 0 && memcmp(pair, pair + ROW, sizeof before) == 0
               ? "the same"
               : "different",
           memcmp(before, after, sizeof before) == 0 ? "the same" : "another one");
    check(kvant_tensor_clear_blocks(k, 8, 2)); /* two blocks are empty again */
    kvant_tensor_clear(v);                     /* all blocks and all transforms are gone */
    set_affine();
    kvant_tensor_free(&k);
    kvant_tensor_free(&v);
    kvant_scheme_free(&scheme);
    free(k_memory), free(v_memory);
    return 0;
}
