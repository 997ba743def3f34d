/* test_plugin_moved_states.c - states that go from a CPU to a GPU and back, and the other way
 * round, through files named by KVANT_TEST_STATE. Four stages run in their order, each in a process
 * with the memory that its name says. test_plugin_gpu_states.c has states that stay on GPUs. */
#define _GNU_SOURCE
#include "saved_fixture.h"

/* Presets keep up to 12 blocks exact on a GPU. */

static int start(void **state)
{
    int status;

    if (getenv("KVANT_TEST_STATE") == NULL) {
        print_message("skipped: needs KVANT_TEST_STATE\n");
        exit(77);
    }
    setenv("KVANT_STATES", "codes", 1);
    setenv("KVANT_EXACT", "0", 1);
    status = harness_start(state);
    if (status == 0)
        harness_tokens(tokens, MOST);
    return status;
}

static const char *const specs[] = { "", "trellis-4:transform=first", "turboquant-4",
                                     "trellis-4:center=first", "f16" };

enum { N_SPECS = sizeof(specs) / sizeof(specs[0]) };

static void path_of(char *path, size_t n, const char *what, size_t spec)
{
    snprintf(path, n, "%s.%zu.%s", getenv("KVANT_TEST_STATE"), spec, what);
}

static struct llama_context *load(const char *what, size_t spec)
{
    const harness_options options = { .spec = specs[spec], .n_ctx = 2048 };
    struct llama_context *context = harness_context(&options);
    llama_token read[N_LONG];
    size_t n = 0;
    char path[512];

    path_of(path, sizeof(path), what, spec);
    assert_true(llama_state_seq_load_file(context, path, 0, read, N_LONG, &n) > 0);
    assert_memory_equal(read, tokens, sizeof(read));
    return context;
}

static void save_as(struct llama_context *context, const char *what, size_t spec)
{
    char path[512];

    path_of(path, sizeof(path), what, spec);
    assert_true(llama_state_seq_save_file(context, path, 0, tokens, N_LONG) > 0);
}

static void write_logits(struct llama_context *context, const char *what, size_t spec)
{
    float *logits = continue_from(context, N_LONG, 0);
    char path[512];
    FILE *file;

    path_of(path, sizeof(path), what, spec);
    file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(logits, 1, logits_bytes(), file), logits_bytes());
    assert_int_equal(fclose(file), 0);
    free(logits);
}

static void check_logits(struct llama_context *context, const char *what, size_t spec)
{
    float *logits = malloc(logits_bytes());
    char path[512];
    FILE *file;

    assert_non_null(logits);
    path_of(path, sizeof(path), what, spec);
    file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fread(logits, 1, logits_bytes(), file), logits_bytes());
    fclose(file);
    assert_continues_after(context, N_LONG, 0, logits, specs[spec]);
    free(logits);
}

/* Values with a matrix, which only a CPU has, are decoded. */
static bool moves(size_t spec)
{
    return strstr(specs[spec], "transform=") == NULL;
}

static void save_own(const char *state, const char *logits)
{
    for (size_t i = 0; i < N_SPECS; i++) {
        const harness_options options = { .spec = specs[i], .n_ctx = 2048 };
        struct llama_context *context = prompted(&options, N_LONG);

        save_as(context, state, i);
        write_logits(context, logits, i);
        llama_free(context);
    }
}

static void pass_on(const char *from, const char *to)
{
    for (size_t i = 0; i < N_SPECS; i++) {
        struct llama_context *context = load(from, i);

        save_as(context, to, i);
        llama_free(context);
    }
}

static void check_returned(const char *state, const char *logits)
{
    for (size_t i = 0; i < N_SPECS; i++) {
        struct llama_context *context = load(state, i);

        if (moves(i))
            check_logits(context, logits, i);
        llama_free(context);
    }
}

/* The blocks of 64 tokens in which some row differs, a bit each. */
static uint64_t blocks_that_differ(const saved *a, const saved *b)
{
    const size_t layers = (size_t)llama_model_n_layer(harness_model()), row = harness_row_bytes();
    uint64_t blocks = 0;

    for (size_t i = 0; i < 2 * layers; i++)
        for (size_t t = 0; t < N_LONG; t++) {
            const size_t at = harness_rows_at(a->size, N_LONG, i >= layers, i % layers) + t * row;
            blocks |= (uint64_t)(memcmp(a->data + at, b->data + at, row) != 0) << t / 64;
        }
    return blocks;
}

/* A GPU keeps rows exact until another block needs their page. A CPU seals those that are neither
 * first nor newest, which are at most the 512 rows of a step. */
static void check_sealed_rows(const char *state, const char *returned)
{
    for (size_t i = 0; i < N_SPECS; i++) {
        struct llama_context *a, *b;
        saved first, second;
        uint64_t differ;
        int n = 0;

        setenv("KVANT_STATES", "rows", 1);
        a = load(state, i);
        b = load(returned, i);
        first = save(a, 0);
        second = save(b, 0);
        assert_int_equal(first.size, second.size);
        differ = blocks_that_differ(&first, &second);
        for (uint64_t left = differ; left != 0; left &= left - 1)
            n++;
        print_message("%s: blocks %llx were exact on a GPU alone\n", specs[i],
                      (unsigned long long)differ);
        assert_true(n <= 8);
        assert_true(moves(i) || n > 0);
        if (specs[i][0] == '\0')
            assert_int_equal(differ & (1 | (uint64_t)3 << 19), 0); /* first and newest tokens */
        setenv("KVANT_STATES", "codes", 1);
        llama_free(a);
        llama_free(b);
        drop(&first);
        drop(&second);
    }
}

CASE(one_cpu_saves)
{
    save_own("cpu", "cpu_logits");
}

CASE(two_gpu_saves_and_passes_on)
{
    save_own("gpu", "gpu_logits");
    pass_on("cpu", "cpu_gpu");
}

CASE(three_cpu_passes_on_and_gets_its_state_back)
{
    pass_on("gpu", "gpu_cpu");
    check_returned("cpu_gpu", "cpu_logits");
}

CASE(four_gpu_gets_its_state_back)
{
    check_returned("gpu", "gpu_logits");
    check_sealed_rows("gpu", "gpu_cpu");
}

RUN_CASES(start, harness_stop)
