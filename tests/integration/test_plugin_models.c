#define _POSIX_C_SOURCE 200809L /* unsetenv */
/* test_plugin_models.c - models whose caches are not plain, on the CPU and on the mock of a GPU:
 * sliding windows, a softcap, sinks, recurrent state, keys without values (tiny_models.py). Logits
 * may differ from llama.cpp's f16 cache as much as with llama.cpp's own cache of as many bits. */
#include "harness.h"

enum { N_PROMPT = 200, N_STEPS = 24, N_TAKEN_BACK = 4 }; /* windows have 64 tokens */

static llama_token made_up(int i)
{
    return (llama_token)((unsigned)i * 2654435761u >> 8) % llama_vocab_n_tokens(harness_vocab());
}

static size_t n_logits(void)
{
    return (size_t)N_STEPS * harness_n_vocab();
}

static void decode(struct llama_context *context, int n, llama_pos pos, llama_seq_id seq)
{
    llama_token tokens[N_PROMPT];

    for (int i = 0; i < n; i++)
        tokens[i] = made_up((int)pos + i);
    harness_decode(context, tokens, n, pos, seq, false);
}

/* Logits of a prompt in two batches, then of single tokens. Some tokens are taken back from a
 * checkpoint, as a server does that drafts tokens, while another sequence continues. */
static float *logits_of(const harness_options *options)
{
    /* With v0.5.0, llama.cpp does not restore its own quantised cache from a checkpoint on a
     * device. */
    const llama_state_seq_flags flags =
        LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY |
        (options->type == NULL ? LLAMA_STATE_SEQ_FLAGS_ON_DEVICE : 0);
    struct llama_context *context = harness_context(options);
    const size_t n = harness_n_vocab();
    float *logits = malloc(n_logits() * sizeof(*logits));
    uint8_t *checkpoint;
    size_t size;

    decode(context, N_PROMPT / 2, 0, 0);
    decode(context, N_PROMPT / 2, N_PROMPT / 2, 0);
    decode(context, 90, 0, 1);
    size = llama_state_seq_get_size_ext(context, 0, flags);
    checkpoint = malloc(size);
    assert_int_equal(llama_state_seq_get_data_ext(context, checkpoint, size, 0, flags), size);
    decode(context, N_TAKEN_BACK, N_PROMPT, 0);
    assert_int_equal(llama_state_seq_set_data_ext(context, checkpoint, size, 0, flags), size);
    assert_true(llama_memory_seq_rm(llama_get_memory(context), 0, N_PROMPT, -1));
    for (int i = 0; i < N_STEPS; i++) {
        decode(context, 1, 90 + i, 1);
        decode(context, 1, N_PROMPT + i, 0);
        memcpy(logits + (size_t)i * n, llama_get_logits_ith(context, -1), n * sizeof(*logits));
    }
    llama_free(context);
    free(checkpoint);
    return logits;
}

/* Root mean square difference, relative to the logits. */
static double difference(const harness_options *options, const float *stock)
{
    float *logits = logits_of(options);
    const double rms =
        harness_rms_difference(stock, logits, n_logits()) / harness_rms(stock, n_logits());

    free(logits);
    return rms;
}

/* Each sequence has its own stream. The context is planned first, as --fit does, and uses -fa
 * auto. */
static void check(const char *model, const char *spec, const char *type, double factor,
                  bool unified)
{
    const harness_options plain = { .n_ctx = 512, .n_seq = 2, .unified = unified };
    harness_options ours = plain, rival = plain;
    float *stock = logits_of(&plain);
    double a, b;

    ours.spec = spec;
    ours.fa_auto = !unified;
    rival.type = type;
    if (!unified)
        harness_plan(&ours);
    a = difference(&ours, stock);
    b = difference(&rival, stock);
    print_message("%s, %s: %.5f, %s %.5f\n", model, spec, a, type, b);
    assert_true(a > 1e-6); /* otherwise the cache was f16 */
    assert_true(a <= factor * b);
    free(stock);
}

/* The default has a quarter of a bit per number less than q4_0, so its errors may be 2^0.25 times
 * as large. */
#define QUARTER_BIT 1.19

static void check_all(const char *model)
{
    harness_load_tiny(model);
    check(model, "int-8", "q8_0", 1.6, true);
    check(model, "int-8", "q8_0", 1.6, false);
    check(model, "int-8:center=first,norm=first", "q8_0", 1.6, true);
    check(model, "", "q4_0", QUARTER_BIT, true);
}

CASE(sliding_windows)
{
    check_all("gemma3");
}

/* llama.cpp has no quantised cache for such rows, because its blocks are 32 numbers of one head. So
 * the plain model's error at the same bits is the bound. */
static void check_head_dim(const char *model, double plain_error)
{
    const harness_options plain = { .n_ctx = 512, .n_seq = 2, .unified = true };
    harness_options ours = plain;
    float *stock;
    double error;

    harness_load_tiny(model);
    stock = logits_of(&plain);
    ours.spec = "";
    error = difference(&ours, stock);
    print_message("%s, balanced: %.5f, head_dim 64, q4_0: %.5f\n", model, error, plain_error);
    assert_true(error > 1e-6 && error <= 1.6 * plain_error);
    free(stock);
}

CASE(other_head_dims)
{
    const harness_options plain = { .n_ctx = 512, .n_seq = 2, .unified = true };
    harness_options rival = plain;
    float *stock;
    double error;

    harness_load_tiny("llama");
    stock = logits_of(&plain);
    rival.type = "q4_0";
    error = difference(&rival, stock);
    free(stock);
    check_head_dim("llama80", error);
    check_head_dim("llama16", error);
    if (!harness_on_gpu()) /* the GPU needs a head_dim that is a multiple of 16 */
        check_head_dim("llama24", error);
}

CASE(softcap)
{
    check_all("gemma2");
}

CASE(sinks)
{
    check_all("gpt-oss");
}

CASE(recurrent_state)
{
    check_all("lfm2");
}

static void stays_as_it_is(const char *model)
{
    const harness_options plain = { .n_ctx = 512, .n_seq = 2, .unified = true };
    harness_options ours = plain;
    float *stock;
    double most;

    harness_load_tiny(model);
    stock = logits_of(&plain);
    ours.spec = "turboquant-4";
    harness_plan(&ours);
    /* a real GPU rounds differently */
    most = harness_on_gpu() && !harness_has_mock() ? 2e-2 : 1e-6;
    assert_true(difference(&ours, stock) < most);
    free(stock);
}

/* An indexer's keys, and latents with 32 RoPE channels. */
CASE(keys_without_values_stay_as_they_are)
{
    stays_as_it_is("deepseek2");
}

/* Latents are compressed only in the computer's memory. */
CASE(latents)
{
    if (harness_on_gpu())
        stays_as_it_is("latents");
    else
        check_all("latents");
}

/* Two tokens of one sequence and one token of each of two other sequences, together or one after
 * another. Only the new rows may round differently, to fp16. A cell too many or too few would cause
 * an error of the size of the logits. */
static float *mixed_logits(bool together)
{
    static const struct {
        int pos, seq;
    } next[] = { { 100, 0 }, { 101, 0 }, { 60, 1 }, { 90, 2 } };
    const harness_options options = { .spec = "f16", .n_ctx = 512, .n_seq = 3, .unified = true };
    struct llama_context *context = harness_context(&options);
    struct llama_batch batch = llama_batch_init(4, 0, 1);
    const size_t n = harness_n_vocab();
    float *logits = malloc(4 * n * sizeof(*logits));

    decode(context, 100, 0, 0);
    decode(context, 60, 0, 1);
    decode(context, 90, 0, 2);
    for (int i = 0; i < 4; i++) {
        harness_add(&batch, made_up(next[i].pos), next[i].pos, next[i].seq, true);
        if (together && i < 3)
            continue;
        assert_int_equal(llama_decode(context, batch), 0);
        for (int j = 0; j < batch.n_tokens; j++)
            memcpy(logits + (size_t)(i + 1 - batch.n_tokens + j) * n,
                   llama_get_logits_ith(context, j), n * sizeof(*logits));
        batch.n_tokens = 0;
    }
    llama_batch_free(batch);
    llama_free(context);
    return logits;
}

CASE(latents_of_several_sequences_in_one_batch)
{
    float *one, *other;
    double difference;

    harness_load_tiny("latents");
    one = mixed_logits(true);
    other = mixed_logits(false);
    difference = harness_rms_difference(one, other, 4 * harness_n_vocab()) /
                 harness_rms(other, 4 * harness_n_vocab());
    print_message("together or not: %.2e\n", difference);
    assert_true(difference < 1e-2);
    free(one);
    free(other);
}

/* Decodes one more token; whether its logits are NaN. */
static bool next_is_nan(struct llama_context *context, llama_pos pos, llama_seq_id seq)
{
    size_t n = 0;

    decode(context, 1, pos, seq);
    for (size_t i = 0; i < harness_n_vocab(); i++)
        n += isnan(llama_get_logits_ith(context, -1)[i]) != 0;
    assert_true(n == 0 || n == harness_n_vocab());
    return n > 0;
}

/* A state of llama.cpp's cache has a NaN among the RoPE channels of one row of its last layer. The
 * sequence that sees the row gets NaNs, and another sequence in the same cache does not. */
CASE(bad_rows_of_latents)
{
    enum { N_TOKENS = 90, BAD = 40, ROW_BYTES = (256 + 64) * sizeof(uint16_t) };
    const harness_options plain = { .n_ctx = 512, .n_seq = 2, .unified = true };
    const uint16_t nan_half = 0x7e00;
    harness_options ours = plain;
    struct llama_context *context;
    uint8_t *saved;
    size_t size;

    harness_load_tiny("latents");
    context = harness_context(&plain);
    decode(context, N_TOKENS, 0, 0);
    saved = harness_save_state(context, &size);
    llama_free(context);
    memcpy(saved + size - (N_TOKENS - BAD - 1) * ROW_BYTES - 20, &nan_half, sizeof(nan_half));
    ours.spec = "";
    context = harness_context(&ours);
    decode(context, N_PROMPT, 0, 1);
    assert_int_equal(llama_state_seq_set_data(context, saved, size, 0), size);
    assert_true(next_is_nan(context, N_TOKENS, 0));
    assert_false(next_is_nan(context, N_PROMPT, 1));
    llama_free(context);
    free(saved);
}

/* Logits of single tokens behind a prompt. A second context decodes each token first. */
static float *logits_beside(const harness_options *options, const harness_options *other)
{
    struct llama_context *context = harness_context(options),
                         *second = other != NULL ? harness_context(other) : NULL;
    const size_t n = harness_n_vocab();
    float *logits = malloc(n_logits() * sizeof(*logits));

    for (int i = -1; i < N_STEPS; i++) {
        const int pos = i < 0 ? 0 : N_PROMPT + i;
        if (second != NULL)
            decode(second, i < 0 ? N_PROMPT : 1, pos, 0);
        decode(context, i < 0 ? N_PROMPT : 1, pos, 0);
        if (i >= 0)
            memcpy(logits + (size_t)i * n, llama_get_logits_ith(context, -1), n * sizeof(*logits));
    }
    llama_free(context);
    if (second != NULL)
        llama_free(second);
    return logits;
}

/* The same codecs have the same errors, wherever the weights are. The GPU rounds other sums than
 * the CPU, which moves a code only where a number lies between two codes. So the logits of both
 * differ by less than each differs from logits without compression. */
static void check_weights_on_a_gpu(const char *model)
{
    const harness_options plain = { .n_ctx = 512, .n_seq = 1 };
    const harness_options ours = { .n_ctx = 512, .n_seq = 1, .spec = "int-4" };
    const harness_options other = { .n_ctx = 512, .n_seq = 1, .spec = "int-8" };
    float *gpu, *beside, *cpu, *stock;
    double moved, error;

    if (!harness_offloads())
        skip();
    harness_load_tiny(model);
    gpu = logits_beside(&ours, NULL);
    beside = logits_beside(&ours, &other);
    assert_memory_equal(gpu, beside, n_logits() * sizeof(*gpu));
    unsetenv("KVANT_TEST_OFFLOAD"); /* from now on the device is KVANT */
    harness_load_tiny(model);
    cpu = logits_beside(&ours, NULL);
    stock = logits_beside(&plain, NULL);
    moved = harness_rms_difference(gpu, cpu, n_logits());
    error = harness_rms_difference(cpu, stock, n_logits());
    print_message("GPU and CPU differ by %.6f, from f16 by %.6f\n", moved, error);
    assert_true(error > 0 && moved < 0.5 * error);
    free(stock);
    free(gpu);
    free(beside);
    free(cpu);
}

CASE(weights_on_a_gpu_or_on_the_cpu)
{
    check_weights_on_a_gpu("llama");
}

/* The driver of the tests takes minutes for llama.cpp's own attention on latents, which only the
 * CPU computes here. */
CASE(latents_on_a_gpu_or_on_the_cpu)
{
    check_weights_on_a_gpu("latents");
}

RUN_CASES(harness_load_plugin, harness_stop)
