/* test_plugin_gpu.c - the devices of a llama.cpp with CUDA, on the mock of ggml-cuda
 * (mock_cuda.c). Graphs are cut at kvant's nodes, captured and replayed, and results are as good as
 * the codec's bits allow. test_plugin_gpu_rows.c tests where rows are. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "gpu_fixture.h"

/* How many graphs the driver has launched, and how many launches updated an existing graph. */
static unsigned long launches(unsigned long *updates)
{
    unsigned long (*count)(unsigned long *);
    void *symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "host_launches");

    if (!harness_has_mock())
        return 0;
    assert_non_null(symbol);
    memcpy(&count, &symbol, sizeof(symbol));
    return count(updates);
}

/* Edges that should have been removed from the last captured graph. */
static size_t edges_left(void)
{
    size_t (*count)(void);
    void *symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "host_edges_left");

    assert_non_null(symbol);
    memcpy(&count, &symbol, sizeof(symbol));
    return count();
}

static unsigned long counter(const char *name)
{
    if (!harness_has_mock())
        return 0;
    return *(unsigned long *)ggml_backend_reg_get_proc_address(ggml_backend_reg_by_name("CUDA"),
                                                               name);
}

/* Logits of N_STEPS tokens, one at a time, after the prompt in batches of `batch` tokens. */
static void steps_after(struct llama_context *context, int batch, float *logits)
{
    const size_t n = harness_n_vocab();

    for (int i = 0; i < N_PROMPT; i += batch)
        harness_decode(context, tokens + i, batch < N_PROMPT - i ? batch : N_PROMPT - i, i, 0,
                       false);
    for (int i = 0; i < N_STEPS; i++) {
        harness_decode(context, tokens + N_PROMPT + i, 1, N_PROMPT + i, 0, false);
        memcpy(logits + (size_t)i * n, llama_get_logits_ith(context, -1), n * sizeof(*logits));
    }
}

static void steps(struct llama_context *context, float *logits)
{
    steps_after(context, N_PROMPT, logits);
}

/* Runs the same tokens twice, with a clear between: a graph that was captured before must not be
 * replayed with old centres. */
static void run_twice(const char *spec, const char *graphs, float *first, float *second)
{
    const harness_options options = { .spec = spec, .n_ctx = 512 };
    struct llama_context *context;

    setenv("KVANT_GRAPH", graphs, 1);
    context = harness_context(&options);
    steps(context, first);
    llama_memory_clear(llama_get_memory(context), true);
    steps(context, second);
    llama_free(context);
    unsetenv("KVANT_GRAPH");
}

/* A replayed graph runs the captured kernels with the arguments of the capture. It reads cell
 * numbers and masks when it runs. So its bits equal the bits of kernels that are launched one by
 * one. */
static void check_replay(const char *spec)
{
    float *logits[4];
    unsigned long before, captured, updates;

    for (int i = 0; i < 4; i++)
        logits[i] = harness_new_logits(N_STEPS);
    captured = counter("mock_recorded");
    run_twice(spec, "0", logits[0], logits[1]);
    assert_int_equal(counter("mock_recorded"), captured);
    before = launches(&updates);
    run_twice(spec, "1", logits[2], logits[3]);
    print_message("%s: %lu graphs launched, %lu parts recorded\n", spec,
                  launches(&updates) - before, counter("mock_recorded") - captured);
    /* All tokens except those that begin a graph: a graph holds up to 256 cells, and its first
     * token is computed in parts. */
    assert_true(!harness_has_mock() || launches(&updates) - before >= 2 * N_STEPS - 8);
    if (harness_has_mock())
        assert_int_equal(edges_left(), 0);
    assert_true(!harness_has_mock() || counter("mock_recorded") > captured);
    for (int i = 0; i < 3; i++)
        assert_memory_equal(logits[i], logits[i + 1],
                            N_STEPS * harness_n_vocab() * sizeof(**logits));
    for (int i = 0; i < 4; i++)
        free(logits[i]);
}

CASE(replayed_graphs_give_the_same_bits)
{
    check_replay("turboquant-4");
    check_replay("trellis-4:center=first,norm=first,sink=0");
    check_replay("int-4:axis=channel,norm=first,recent=100");
    check_replay("");
}

/* Before n tokens that a target accepts, a draft model proposes 4, of which the target takes back 1
 * to 4. */
static void draft(struct llama_context *target, struct llama_context *drafter, int pos)
{
    for (int i = 0; i < 4; i++)
        harness_decode(drafter, tokens + pos + i, 1, pos + i, 0, false);
    harness_decode(target, tokens + pos, 4, pos, 0, true);
    assert_true(llama_memory_seq_rm(llama_get_memory(target), 0, pos + pos % 4, -1));
    assert_true(llama_memory_seq_rm(llama_get_memory(drafter), 0, pos + pos % 4, -1));
    harness_decode(target, tokens + pos + pos % 4, 1, pos + pos % 4, 0, false);
    harness_decode(drafter, tokens + pos + pos % 4, 1, pos + pos % 4, 0, false);
}

/* As steps(), but with drafts: two contexts on one device alternate. */
static void drafted_steps(const harness_options *options, float *logits)
{
    struct llama_context *target = harness_context(options), *drafter = harness_context(options);
    const size_t n = harness_n_vocab();
    int pos = N_PROMPT;

    harness_decode(target, tokens, N_PROMPT, 0, 0, false);
    harness_decode(drafter, tokens, N_PROMPT, 0, 0, false);
    memset(logits, 0, N_STEPS * n * sizeof(*logits));
    for (int i = 0; pos + 4 < N_PROMPT + N_STEPS; i++) {
        draft(target, drafter, pos);
        memcpy(logits + (size_t)i * n, llama_get_logits_ith(i % 2 ? drafter : target, -1),
               n * sizeof(*logits));
        pos += 1 + pos % 4;
    }
    llama_free(target);
    llama_free(drafter);
}

CASE(drafts_are_taken_back)
{
    static const char *const pairs[][2] = { { "int-8", "q8_0" }, { "", "q4_0" } };
    float *stock, *ours, *rival;

    harness_need_floats();
    stock = harness_new_logits(N_STEPS), ours = harness_new_logits(N_STEPS),
    rival = harness_new_logits(N_STEPS);
    drafted_steps(&(harness_options){ .n_ctx = 512 }, stock);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        double a, b;
        drafted_steps(&(harness_options){ .spec = pairs[i][0], .n_ctx = 512 }, ours);
        drafted_steps(&(harness_options){ .type = pairs[i][1], .n_ctx = 512 }, rival);
        a = harness_mean_kld(stock, ours, N_STEPS);
        b = harness_mean_kld(stock, rival, N_STEPS);
        print_message("mean KLD with drafts: %s %.5f, %s %.5f\n", pairs[i][0], a, pairs[i][1], b);
        assert_true(a > 1e-7 && a <= 1.6 * b);
    }
    free(stock);
    free(ours);
    free(rival);
}

static double divergence(const harness_options *options, const float *stock)
{
    struct llama_context *context = harness_context(options);
    float *logits = harness_new_logits(N_STEPS);
    double kld;

    steps(context, logits);
    kld = harness_mean_kld(stock, logits, N_STEPS);
    llama_free(context);
    free(logits);
    return kld;
}

/* The bounds of test_plugin_logits.c, where they are derived. With KVANT_CALIBRATION, presets are
 * calibrated. tiny: the error of trellis-2 is 8 times the error of turboquant-4. */
CASE(errors_are_those_of_the_bits)
{
    static const struct {
        const char *spec, *type;
        double factor;
        const char *preset;
    } pairs[] = { { "turboquant-4", "q4_0", 1.7, NULL },
                  { "int-8", "q8_0", 1.6, NULL },
                  { "int-8:axis=channel", "q8_0", 1.6, NULL },
                  { "trellis-4", "q4_0", 1, NULL },
                  { "", "q4_0", 1, "balanced" },
                  { "", "q5_0", 1, "quality" },
                  { "", "q4_0", 1, "small" },
                  { "", "q4_0", 14, "tiny" } };
    struct llama_context *context;
    float *stock;

    harness_need_floats();
    context = harness_context(&(harness_options){ .n_ctx = 512 });
    stock = harness_new_logits(N_STEPS);
    steps(context, stock);
    llama_free(context);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        if (pairs[i].preset != NULL)
            setenv("KVANT_PRESET", pairs[i].preset, 1);
        double ours = divergence(&(harness_options){ .spec = pairs[i].spec, .n_ctx = 512 }, stock);
        double rival = divergence(&(harness_options){ .type = pairs[i].type, .n_ctx = 512 }, stock);
        print_message("mean KLD: %s%s %.5f, %s %.5f\n", pairs[i].spec,
                      pairs[i].preset != NULL ? pairs[i].preset : "", ours, pairs[i].type, rival);
        unsetenv("KVANT_PRESET");
        assert_true(ours > 1e-7); /* otherwise the cache was f16 */
        assert_true(ours <= pairs[i].factor * rival);
    }
    free(stock);
}

/* Centre and scale are learned from 64 tokens, in any number of batches. Errors are as small as for
 * a prompt in one batch. */
CASE(centres_are_learnt_from_enough_tokens)
{
    static const char *const specs[] = { "trellis-4:center=first,norm=first",
                                         "turboquant-6:center=first,norm=first",
                                         "turboquant-4:center=first",
                                         "int-5:axis=channel,center=first,norm=first" };
    static const int batches[] = { N_PROMPT, 1, 40 };
    struct llama_context *context = harness_context(&(harness_options){ .n_ctx = 512 });
    float *stock = harness_new_logits(N_STEPS), *ours = harness_new_logits(N_STEPS);

    steps(context, stock);
    llama_free(context);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        double whole = 0;
        for (size_t j = 0; j < sizeof batches / sizeof *batches; j++) {
            double kld;
            context = harness_context(&(harness_options){ .spec = specs[i], .n_ctx = 512 });
            steps_after(context, batches[j], ours);
            llama_free(context);
            kld = harness_mean_kld(stock, ours, N_STEPS);
            print_message("%s, batches of %d: %.5f\n", specs[i], batches[j], kld);
            whole = j == 0 ? kld : whole;
            assert_true(kld > 1e-7 && kld <= 1.6 * whole);
        }
    }
    free(stock);
    free(ours);
}

/* Logits after prompts of `batch` tokens. A matrix comes after graphs were captured, and rows that
 * were stored before are encoded with it. */
static void late_steps(const char *spec, const char *graphs, int batch, float *logits)
{
    const size_t n = harness_n_vocab();
    struct llama_context *context;
    int pos = 0;

    setenv("KVANT_GRAPH", graphs, 1);
    context = harness_context(&(harness_options){ .spec = spec, .n_ctx = 512 });
    unsetenv("KVANT_GRAPH");
    harness_decode(context, tokens, 10, 0, 0, false);
    for (pos = 10; pos < 30; pos++)
        harness_decode(context, tokens + pos, 1, pos, 0, false);
    for (; pos < N_PROMPT; pos += batch)
        harness_decode(context, tokens + pos, batch, pos, 0, false);
    for (int i = 0; i < N_STEPS; i++) {
        harness_decode(context, tokens + N_PROMPT + i, 1, N_PROMPT + i, 0, false);
        memcpy(logits + (size_t)i * n, llama_get_logits_ith(context, -1), n * sizeof(*logits));
    }
    llama_free(context);
}

CASE(matrices_come_late)
{
    float *stock, *parts, *graphs;
    const bool trained = llama_vocab_type(harness_vocab()) !=
                         LLAMA_VOCAB_TYPE_NONE; /* random weights: channels are hardly correlated */
    double factors, matrices;

    harness_need_floats();
    stock = harness_new_logits(N_STEPS), parts = harness_new_logits(N_STEPS),
    graphs = harness_new_logits(N_STEPS);
    for (int batch = 20; batch <= N_PROMPT - 30; batch *= 6) {
        late_steps(NULL, "1", batch, stock);
        late_steps("turboquant-3:center=first,norm=first", "1", batch, graphs);
        factors = harness_mean_kld(stock, graphs, N_STEPS);
        late_steps("turboquant-3:transform=first", "0", batch, parts);
        late_steps("turboquant-3:transform=first", "1", batch, graphs);
        matrices = harness_mean_kld(stock, graphs, N_STEPS);
        print_message("mean KLD, prompts of %d: factors %.5f, matrices %.5f\n", batch, factors,
                      matrices);
        assert_memory_equal(parts, graphs, N_STEPS * harness_n_vocab() * sizeof(*graphs));
        assert_true(matrices > 1e-7 && matrices < (trained ? 1 : 1.2) * factors);
    }
    free(stock);
    free(parts);
    free(graphs);
}

/* The first matrix is for the rows that have it, for however many positions the cache has room. */
CASE(room_makes_no_difference)
{
    float *const logits[2] = { harness_new_logits(N_STEPS), harness_new_logits(N_STEPS) };

    for (int i = 0; i < 2; i++) {
        struct llama_context *context = harness_context(
            &(harness_options){ .spec = "turboquant-3:transform=first", .n_ctx = 4096u << i });
        steps(context, logits[i]);
        llama_free(context);
    }
    assert_memory_equal(logits[0], logits[1], N_STEPS * harness_n_vocab() * sizeof(**logits));
    free(logits[0]);
    free(logits[1]);
}

/* The last tokens of a prompt are fp16, and the next tokens depend on them more than on others. */
CASE(recent_tokens_stay_as_they_are)
{
    struct llama_context *context = harness_context(&(harness_options){ .n_ctx = 512 });
    float *stock = harness_new_logits(N_STEPS);
    double all, most;

    steps(context, stock);
    llama_free(context);
    all = divergence(&(harness_options){ .spec = "turboquant-3", .n_ctx = 512 }, stock);
    most = divergence(&(harness_options){ .spec = "turboquant-3:recent=128", .n_ctx = 512 }, stock);
    print_message("mean KLD: turboquant-3 %.5f, with recent=128 %.5f\n", all, most);
    assert_true(most > 1e-7 && most < 0.7 * all);
    free(stock);
}

/* Positions at which keys have a further matrix, 1024 tokens after the position that it is learned
 * for. FAR is one batch after that, FARTHER is many blocks after. N_NEAR tokens before it end
 * learning. */
enum {
    N_AT_ONCE = 168,
    FAR = 2048 + 1024 + N_AT_ONCE,
    FARTHER = FAR + 12 * N_AT_ONCE,
    N_NEAR = 17 * N_AT_ONCE,
    N_FAR = 100
};

/* hidden: tokens of another sequence. matrices: expected number of key matrices in the last
 * attention; 0: kvant does not compute it. Returns the state, which the caller frees. */
static uint8_t *far_steps(const char *spec, const char *type, int far, int hidden,
                          uint32_t matrices, float *logits, size_t *size)
{
    const harness_options options = {
        .spec = spec, .type = type, .n_ctx = 4096, .n_seq = 2, .unified = true
    };
    struct llama_context *context = harness_context(&options);
    const size_t n = harness_n_vocab();
    llama_pos pos = far - N_NEAR;
    uint8_t *saved;

    if (hidden > 0)
        harness_decode(context, tokens, hidden, 0, 1, false);
    for (; pos < far; pos += N_AT_ONCE)
        harness_decode(context, tokens + pos % 20, N_AT_ONCE, pos, 0, false);
    harness_decode(context, tokens + 7, N_FAR, pos, 0, false);
    for (int i = 0; i < N_STEPS; i++) {
        harness_decode(context, tokens + N_PROMPT + i, 1, pos + N_FAR + i, 0, false);
        memcpy(logits + (size_t)i * n, llama_get_logits_ith(context, -1), n * sizeof(*logits));
    }
    if (harness_has_mock() && matrices > 0) {
        assert_int_equal(last_attention()->n_matrices, matrices);
        assert_non_null(last_attention()->plain_queries.q);
    }
    saved = harness_save_state(context, size);
    llama_free(context);
    return saved;
}

/* Rows are stored as int-8, and results err as int-8 does (bounds as above), captured or not. */
static void far_rows_are_as_good(int far, uint32_t matrices)
{
    static const char spec[] = "int-8:transform=first";
    float *const stock = harness_new_logits(N_STEPS), *const ours = harness_new_logits(N_STEPS),
                 *const graphs = harness_new_logits(N_STEPS);
    size_t size, stock_size;
    double rival, kld;

    uint8_t *const rows = far_steps(NULL, NULL, far, 0, 0, stock, &stock_size);
    free(far_steps(NULL, "q8_0", far, 0, 0, ours, &size));
    rival = harness_mean_kld(stock, ours, N_STEPS);
    setenv("KVANT_GRAPH", "0", 1);
    free(far_steps(spec, NULL, far, 0, matrices, ours, &size));
    unsetenv("KVANT_GRAPH");
    uint8_t *const own = far_steps(spec, NULL, far, 0, 0, graphs, &size);
    assert_memory_equal(ours, graphs, N_STEPS * harness_n_vocab() * sizeof(*graphs));
    assert_int_equal(size, stock_size);
    assert_true(harness_state_difference(rows, own, size) < 0.02);
    kld = harness_mean_kld(stock, graphs, N_STEPS);
    free(far_steps(spec, NULL, far, 70, 0, ours, &size));
    print_message("mean KLD behind position %d: %.6f, beside a hidden sequence %.6f, q8_0 %.6f\n",
                  far, kld, harness_mean_kld(stock, ours, N_STEPS), rival);
    assert_true(kld > 1e-8 && kld <= 1.6 * rival);
    assert_true(harness_mean_kld(stock, ours, N_STEPS) <= 1.6 * rival);
    free(rows);
    free(own);
    free(stock);
    free(ours);
    free(graphs);
}

/* These tests come last, because they replace the model by a tiny one, which is fast enough for
 * thousands of tokens. */
static void check_far_rows(int far)
{
    if (getenv("KVANT_CALIBRATION") != NULL)
        skip(); /* the calibration belongs to another model */
    harness_load_tiny("llama");
    harness_tokens(tokens, N_PROMPT + N_STEPS);
    far_rows_are_as_good(far, 2);
}

CASE(far_rows_have_matrices_of_their_own)
{
    check_far_rows(FAR);
}

CASE(far_rows_of_many_blocks_have_them_too)
{
    check_far_rows(FARTHER);
}

RUN_CASES(start, harness_stop)
