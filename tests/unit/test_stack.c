/* test_stack.c - every call fits a thread with 64 KiB of stack: creation, encoding, decoding,
 * tensors, attention. */
#include "testing.h"

#include <kvant/attention.h>
#include <kvant/tensor.h>

#include <pthread.h>

/* A thread's stack also holds its guard page and its thread-local storage. Sanitisers enlarge
 * frames. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PROMISED ((size_t)4 * 64 * 1024)
#else
#define PROMISED ((size_t)64 * 1024)
#endif
#define GUARD ((size_t)4096)
#define STACK ((size_t)1024 * 1024)
#define PAINT 0xa5

#define SLOTS 192u
#define HEADS 2u
#define TOKENS 64u

typedef struct job {
    const char *spec;
    uint32_t d, n_tokens; /* for attention */
    kvant_codec *codec[2];
    kvant_tensor *tensor[2];
    void *memory[2], *page, *workspace, *exported;
    float *rows, *q, *out;
    int64_t slots[SLOTS];
    kvant_attention_problem attention;
    size_t workspace_bytes, exported_bytes;
    kvant_status status;
} job;

static void keep(job *j, kvant_status status)
{
    j->status = j->status == KVANT_OK ? status : j->status;
}

static void *create(void *argument)
{
    job *j = argument;
    char err[256];
    for (int role = 0; role < 2; role++)
        keep(j, kvant_codec_create(j->spec, j->d, (kvant_role)role, TEST_SEED, &j->codec[role], err,
                                   sizeof err));
    return NULL;
}

static void *convert(void *argument)
{
    job *j = argument;
    for (int role = 0; role < 2; role++) {
        keep(j, kvant_codec_encode(j->codec[role], NULL, j->rows, j->d, 0, KVANT_PAGE_TOKENS,
                                   j->page));
        keep(j,
             kvant_codec_decode(j->codec[role], NULL, j->page, 0, KVANT_PAGE_TOKENS, j->out, j->d));
    }
    keep(j, kvant_codec_transform_query(j->codec[0], NULL, j->q, j->out));
    keep(j, kvant_codec_score(j->codec[0], j->page, j->q, j->d, 4, j->out));
    keep(j, kvant_codec_accumulate(j->codec[1], j->page, j->rows, 4, j->out, j->d));
    keep(j, kvant_codec_transform_output(j->codec[1], NULL, 1, j->out, j->out));
    return NULL;
}

static kvant_tensor_params params_of(job *j, int role)
{
    return (kvant_tensor_params){ .size = sizeof(kvant_tensor_params),
                                  .codecs = (const kvant_codec *const *)&j->codec[role],
                                  .n_kv_heads = 1,
                                  .n_sequences = 1,
                                  .n_blocks = SLOTS / KVANT_PAGE_TOKENS };
}

/* Describes the RoPE of keys that learn a matrix, and gives their blocks centres. */
static void tell_rope(job *j)
{
    static float frequencies[KVANT_MAX_HEAD_DIM / 2];
    const kvant_rope rope = { .size = sizeof rope,
                              .n_dims = j->d,
                              .frequencies = frequencies,
                              .n_positions = SLOTS,
                              .block_centers = 1 };
    for (uint32_t i = 0; i < j->d / 2; i++)
        frequencies[i] = 1.0f / (float)(1 + i);
    keep(j, kvant_tensor_set_rope(j->tensor[0], &rope));
}

static void note_queries(job *j, const int32_t *positions)
{
    const kvant_queries queries = { .size = sizeof queries,
                                    .q = j->q,
                                    .token_stride = (size_t)HEADS * j->d,
                                    .head_stride = j->d,
                                    .n_tokens = TOKENS,
                                    .n_heads = HEADS,
                                    .positions = positions };
    keep(j, kvant_tensor_note_queries(j->tensor[0], &queries, 1));
    kvant_tensor_next_positions(j->tensor[0], positions, SLOTS);
}

static void *write_and_read(void *argument)
{
    job *j = argument;
    int32_t positions[SLOTS];
    for (uint32_t i = 0; i < SLOTS; i++)
        positions[i] = (int32_t)i;
    for (int role = 0; role < 2; role++) {
        kvant_tensor_params params = params_of(j, role);
        keep(j, kvant_tensor_create(&params, j->memory[role], &j->tensor[role]));
        const bool learns =
            role == KVANT_ROLE_K && kvant_tensor_wants_queries(j->tensor[0], TOKENS);
        if (learns)
            tell_rope(j);
        for (int time = 0; time < 2; time++) { /* makes blocks exact and seals them again */
            if (learns)
                note_queries(j, positions);
            keep(j, kvant_tensor_write(j->tensor[role], j->slots, SLOTS, j->rows, j->d, 1));
        }
        keep(j, kvant_tensor_read(j->tensor[role], 0, SLOTS, j->out, j->d));
    }
    return NULL;
}

static bool has_centers(const job *j)
{
    kvant_block_info info = { .size = sizeof info };
    return kvant_tensor_get_block(j->tensor[0], 2, 0, &info) == KVANT_OK && info.start;
}

static void *exchange(void *argument)
{
    job *j = argument;
    size_t used = 0;
    keep(j, kvant_tensor_export(j->tensor[0], 1, j->exported, j->exported_bytes, &used));
    keep(j, kvant_tensor_import(j->tensor[0], 2, j->exported, used));
    keep(j, kvant_tensor_copy(j->tensor[0], 1, j->tensor[0], 0, 1));
    return NULL;
}

static void *attend(void *argument)
{
    job *j = argument;
    size_t bytes = 0;
    keep(j, kvant_attention_workspace(j->tensor[0], j->tensor[1], &j->attention, &bytes));
    keep(j, bytes == j->workspace_bytes ? KVANT_OK : KVANT_ERR_ARGUMENT);
    keep(j, kvant_attention(j->tensor[0], j->tensor[1], &j->attention, j->workspace, bytes));
    return NULL;
}

/* Runs a function on a thread with a painted stack and returns how many bytes it used. Stacks grow
 * downwards. */
static size_t stack_of(void *(*run)(void *), job *j)
{
    static uint8_t *stack;
    pthread_attr_t attributes;
    pthread_t thread;
    size_t untouched = 0;
    if (!stack)
        stack = aligned_alloc(65536, STACK);
    assert_non_null(stack);
    memset(stack, PAINT, STACK);
    assert_int_equal(pthread_attr_init(&attributes), 0);
    assert_int_equal(pthread_attr_setstack(&attributes, stack, STACK), 0);
    assert_int_equal(pthread_create(&thread, &attributes, run, j), 0);
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
    while (untouched < STACK && stack[untouched] == PAINT)
        untouched++;
    return STACK - untouched;
}

static unsigned failures;

static void expect_small(job *j, const char *what, void *(*run)(void *))
{
    size_t bytes = stack_of(run, j);
    if (j->status != KVANT_OK)
        fail_msg("%s, head_dim %u: %s fails: %s", j->spec, j->d, what, kvant_strerror(j->status));
    if (bytes + GUARD > PROMISED) {
        print_error("%s, head_dim %u: %s takes %zu bytes of stack\n", j->spec, j->d, what, bytes);
        failures++;
    }
}

static void prepare_tensors(job *j)
{
    for (int role = 0; role < 2; role++) {
        kvant_tensor_params params = params_of(j, role);
        size_t bytes;
        assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_OK);
        j->memory[role] = aligned(bytes);
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        j->slots[i] = i;
}

static void prepare_attention(job *j)
{
    j->attention = (kvant_attention_problem){ .size = sizeof j->attention,
                                              .n_queries = j->n_tokens,
                                              .n_tokens = SLOTS,
                                              .n_heads = HEADS,
                                              .q = j->q,
                                              .q_token_stride = (size_t)HEADS * j->d,
                                              .q_head_stride = j->d,
                                              .scale = 0.1f,
                                              .out = j->out,
                                              .out_token_stride = (size_t)HEADS * j->d,
                                              .out_head_stride = j->d,
                                              .n_threads = 1 };
    assert_ok(
        kvant_attention_workspace(j->tensor[0], j->tensor[1], &j->attention, &j->workspace_bytes));
    free(j->workspace);
    j->workspace = aligned(j->workspace_bytes);
}

static void run_all(job *j)
{
    size_t page = info_of(j->codec[0]).page_bytes + info_of(j->codec[1]).page_bytes;
    uint64_t state = 5;
    j->page = aligned(page);
    j->rows = aligned((size_t)SLOTS * j->d * sizeof *j->rows);
    j->q = aligned((size_t)TOKENS * HEADS * j->d * sizeof *j->q);
    j->out = aligned((size_t)SLOTS * HEADS * j->d * sizeof *j->out);
    fill_normal(j->rows, (size_t)SLOTS * j->d, &state);
    fill_normal(j->q, (size_t)TOKENS * HEADS * j->d, &state);
    expect_small(j, "converting", convert);
    prepare_tensors(j);
    expect_small(j, "writing and reading", write_and_read);
    assert_int_equal(has_centers(j), strstr(j->spec, "transform=first") != NULL);
    j->exported_bytes = kvant_tensor_export_size(j->tensor[0]);
    j->exported = aligned(j->exported_bytes);
    for (j->n_tokens = 1; j->n_tokens <= TOKENS; j->n_tokens += TOKENS - 1) {
        prepare_attention(j);
        expect_small(j, "attention", attend);
    }
    expect_small(j, "export and import", exchange);
}

static void free_job(job *j)
{
    for (int role = 0; role < 2; role++) {
        kvant_tensor_free(&j->tensor[role]);
        kvant_codec_free(&j->codec[role]);
        free(j->memory[role]);
    }
    free(j->page);
    free(j->rows);
    free(j->q);
    free(j->out);
    free(j->workspace);
    free(j->exported);
}

static void run_spec(const char *spec)
{
    static const uint32_t dims[] = { 64, 128, 256, 512 };
    for (size_t i = 0; i < COUNT(dims); i++) {
        job j = { .spec = spec, .d = dims[i] };
        expect_small(&j, "creation", create);
        run_all(&j);
        free_job(&j);
    }
}

CASE(every_call_fits_a_small_stack)
{
    for (size_t i = 0; i < COUNT(all_specs); i++)
        run_spec(all_specs[i]);
    run_spec("trellis-4:center=first,norm=first");
    run_spec("trellis-4:transform=first");
    assert_int_equal(failures, 0);
}

/* Each CPU level has other kernels. */
CASE(every_cpu_level_fits_a_small_stack)
{
    static const char *const specs[] = { "trellis-4", "turboquant-4", "int-3:axis=channel",
                                         PAPERS("octopus-3", ) "int-4:group=16" };
    for (size_t l = 0; l < COUNT(cpu_levels); l++)
        for (size_t i = 0; i < COUNT(specs) && use_level(cpu_levels[l]); i++)
            run_spec(specs[i]);
    assert_int_equal(kvant_set_cpu_level(KVANT_CPU_AUTO), KVANT_OK);
    assert_int_equal(failures, 0);
}

RUN_CASES(NULL, NULL)
