/* test_plugin_groups.c - codecs whose groups have several tokens, on the devices of a llama.cpp
 * with CUDA (gpu/groups.c), on the mock of ggml-cuda. Blocks hold the codes that the codec makes of
 * llama.cpp's rows, whether a prompt seals them or a few tokens at a time fill them. */
#include <kvant/codec.h>

#include "harness.h"
#include "mock_control.h"

enum { N_TEXT = 1000, BLOCK = 64 };

static llama_token tokens[N_TEXT];

static int start(void **state)
{
    int status;

    harness_need_gpu();
    status = harness_start(state);
    if (status == 0)
        harness_tokens(tokens, N_TEXT);
    return status;
}

/* States */

/* Keys or values of the first layer. They depend on no other token, so they are the same for every
 * codec. */
static const uint8_t *first_layer(const uint8_t *state, size_t size, size_t n, bool values)
{
    return state + harness_rows_at(size, n, values, 0);
}

/* Decodes n tokens of the text in batches, and returns the state. n: a multiple of the batch. */
static uint8_t *decode_text(const char *spec, int n, int batch, size_t *size)
{
    struct llama_context *context =
        harness_context(&(harness_options){ .spec = spec, .n_ctx = 1024 });
    uint8_t *state;

    for (int i = 0; i < n; i += batch)
        harness_decode(context, tokens + i, batch, i, 0, false);
    state = harness_save_state(context, size);
    llama_free(context);
    return state;
}

/* Codes in the computer's memory */

static size_t head_dim(void)
{
    return (size_t)(llama_model_n_embd(harness_model()) / llama_model_n_head(harness_model()));
}

/* Encodes and decodes the f16 rows of a block of one kv head. */
static void code_head(const kvant_codec *codec, const uint8_t *rows, uint8_t *out)
{
    static float numbers[BLOCK * 512];
    static _Alignas(64) uint8_t page[BLOCK * 512 * sizeof(float)];
    const size_t d = head_dim(), width = harness_row_bytes() / sizeof(uint16_t);
    const uint16_t *from = (const uint16_t *)(const void *)rows;
    uint16_t *to = (uint16_t *)(void *)out;

    memset(page, 0, sizeof(page));
    for (size_t i = 0; i < BLOCK; i++)
        ggml_fp16_to_fp32_row(from + i * width, numbers + i * d, (int64_t)d);
    assert_int_equal(kvant_codec_encode(codec, NULL, numbers, d, 0, BLOCK, page), KVANT_OK);
    assert_int_equal(kvant_codec_decode(codec, NULL, page, 0, BLOCK, numbers, d), KVANT_OK);
    for (size_t i = 0; i < BLOCK; i++)
        ggml_fp32_to_fp16_row(numbers + i * d, to + i * width, (int64_t)d);
}

/* How many blocks of n rows hold the codes that the codec makes of llama.cpp's f16 rows. All other
 * blocks must be exact. */
static size_t count_sealed(const kvant_codec *codec, const uint8_t *stock, const uint8_t *ours,
                           size_t n)
{
    const size_t bytes = BLOCK * harness_row_bytes();
    uint8_t *coded = malloc(bytes);
    size_t n_sealed = 0;

    assert_non_null(coded);
    for (size_t first = 0; first + bytes <= n * harness_row_bytes(); first += bytes) {
        for (size_t at = 0; at < harness_row_bytes(); at += head_dim() * sizeof(uint16_t))
            code_head(codec, stock + first + at, coded + at);
        const bool sealed = memcmp(ours + first, coded, bytes) == 0;
        if (!sealed && memcmp(ours + first, stock + first, bytes) != 0)
            fail_msg("block %zu has neither the codec's codes nor exact rows", first / bytes);
        n_sealed += sealed;
    }
    free(coded);
    return n_sealed;
}

/* Creates the codec of the role that has groups of several tokens. */
static kvant_codec *grouped_codec(const char *spec, bool *values)
{
    kvant_codec_info info = { .size = sizeof(info) };
    kvant_codec *codec = NULL;

    for (int role = KVANT_ROLE_K; role <= KVANT_ROLE_V && info.block_tokens < 2; role++) {
        kvant_codec_free(&codec);
        assert_int_equal(
            kvant_codec_create(spec, (uint32_t)head_dim(), (kvant_role)role, 0, &codec, NULL, 0),
            KVANT_OK);
        kvant_codec_get_info(codec, &info);
        *values = role == KVANT_ROLE_V;
    }
    assert_true(info.block_tokens > 1);
    return codec;
}

/* A cache of 1024 tokens has 8 exact pages, and the text fills 15 blocks. With batches of 500
 * tokens, each batch seals its blocks except the last one. */
static void check_codes(const char *spec, const uint8_t *stock, int batch, size_t least)
{
    size_t size, n;
    bool values = false;
    kvant_codec *codec = grouped_codec(spec, &values);
    uint8_t *ours = decode_text(spec, N_TEXT, batch, &size);

    n = count_sealed(codec, first_layer(stock, size, N_TEXT, values),
                     first_layer(ours, size, N_TEXT, values), N_TEXT);
    print_message("%s, batches of %d: %zu of %d blocks of %s are sealed\n", spec, batch, n,
                  N_TEXT / BLOCK, values ? "values" : "keys");
    assert_in_range(n, least, N_TEXT / BLOCK);
    kvant_codec_free(&codec);
    free(ours);
}

/* This compares bits of llama.cpp's rows and of kvant's. On an H200 half of the fp16 numbers of
 * these rows differ in their last bit, so the test is for the mock. */
CASE(blocks_have_the_cpus_codes)
{
    static const char *const specs[] = {
        "int-3:axis=channel",
#if KVANT_PAPERS
        "innerq-base:recent=0,sink=0,norm=none",
        "innerq-hybrid:recent=0,sink=0,norm=none",
        "innerq-small:recent=0,sink=0,norm=none,group=64",
        "kivi-4:recent=0,group=16",
        "kivi-2:recent=0",
        "hqmq-s96r4:med3,median=page",
        "naive-4",
#endif
    };
    const size_t n = sizeof(specs) / sizeof(*specs);
    size_t size;
    uint8_t *stock;

    if (!harness_has_mock())
        skip();
    stock = decode_text(NULL, N_TEXT, 500, &size);
    for (size_t i = 0; i < n; i++)
        check_codes(specs[i], stock, 500, 13);
    check_codes(specs[n - 1], stock, 10, 7);
    free(stock);
}

/* Batches of 16 tokens fill the 8 exact pages. The next batch needs one of them. For it at most 8
 * blocks of each tensor are sealed, each block once. */
CASE(whole_blocks_are_sealed_once)
{
    const unsigned long most = 8 * 2 * (unsigned long)llama_model_n_layer(harness_model());
    const harness_options options = { .spec = "int-3:axis=channel", .n_ctx = 1024 };
    struct llama_context *context;
    unsigned long n = 0;

    if (!harness_has_mock())
        skip();
    context = harness_context(&options);
    for (int i = 0; i <= 8 * BLOCK; i += 16) {
        const unsigned long before = standin_sealed();
        harness_decode(context, tokens + i, 16, i, 0, false);
        n = standin_sealed() - before;
    }
    print_message("%lu blocks of all tensors are sealed, at most %lu\n", n, most);
    assert_in_range(n, 1, most);
    llama_free(context);
}

#if KVANT_PAPERS
/* Tiers choose channels for a block as a whole. At 3.5 bits their logits err less than at 2.5. */
CASE(tiers_are_chosen_for_blocks)
{
    static const char *const specs[] = { NULL, "turboquant-3.5", "turboquant-2.5" };
    float *logits[3];

    for (int i = 0; i < 3; i++)
        logits[i] =
            harness_prompt_logits(&(harness_options){ .spec = specs[i], .n_ctx = 512 }, 400);
    const double small = harness_mean_kld(logits[0], logits[1], 400);
    const double large = harness_mean_kld(logits[0], logits[2], 400);
    print_message("mean KLD: 3.5 bits %.5f, 2.5 bits %.5f\n", small, large);
    assert_true(small > 1e-7 && small < large);
    for (int i = 0; i < 3; i++)
        free(logits[i]);
}
#endif

RUN_CASES(start, harness_stop)
