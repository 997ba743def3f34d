/* test_plugin_gpu_transforms.c - steps whose keys have several transforms, on the mock of ggml-cuda
 * (mock_cuda.c). Captured graphs hold addresses of matrices. They give the bits of graphs that are
 * not captured, also after a shift and with a restored state. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "gpu_fixture.h"

/* Positions from 3072 on have a further transform, which is learned from position 2048 on. */
enum {
    N_AT_ONCE = 168,
    FAR = 3072 + N_AT_ONCE,
    FIRST = FAR - 17 * N_AT_ONCE,
    N_FAR = 100,
    N_SHORT = 70,
    N_EACH = 6,
    MOST_LOGITS = 100
};

/* A context, its two sequences and the logits of its decode steps. */
typedef struct life {
    struct llama_context *context;
    llama_pos ends[2];
    float *logits;
    int n;
} life;

static void keep_logits(life *l, int row)
{
    const size_t n = harness_n_vocab();

    assert_true(l->n < MOST_LOGITS);
    memcpy(l->logits + (size_t)l->n++ * n, llama_get_logits_ith(l->context, row),
           n * sizeof(*l->logits));
}

static void prompt(life *l, llama_seq_id seq, int n)
{
    harness_decode(l->context, tokens + l->ends[seq] % 13, n, l->ends[seq], seq, false);
    l->ends[seq] += n;
}

/* A token of a sequence. */
static void step(life *l, llama_seq_id seq)
{
    prompt(l, seq, 1);
    keep_logits(l, -1);
}

/* A token of each sequence, in one batch. */
static void step_of_both(life *l)
{
    struct llama_batch batch = llama_batch_init(2, 0, 1);

    batch.n_tokens = 2;
    for (llama_seq_id seq = 0; seq < 2; seq++) {
        batch.token[seq] = tokens[l->ends[seq] % 13];
        batch.pos[seq] = l->ends[seq]++;
        batch.n_seq_id[seq] = 1;
        batch.seq_id[seq][0] = seq;
        batch.logits[seq] = 1;
    }
    assert_int_equal(llama_decode(l->context, batch), 0);
    llama_batch_free(batch);
    keep_logits(l, 0);
    keep_logits(l, 1);
}

static void steps_of_one_transform(life *l, llama_seq_id seq)
{
    for (int i = 0; i < N_EACH; i++)
        step(l, seq);
}

/* Sequence 0 reaches the further transform; sequence 1 has the first one. */
static void steps_of_several_transforms(life *l)
{
    l->ends[0] = FIRST;
    while (l->ends[0] < FAR)
        prompt(l, 0, N_AT_ONCE);
    prompt(l, 0, N_FAR);
    steps_of_one_transform(l, 0);
    assert_int_equal(last_attention()->n_matrices, 2);
    prompt(l, 1, N_SHORT);
    steps_of_one_transform(l, 1);
    for (int i = 0; i < N_EACH; i++)
        step(l, i % 2);
    for (int i = 0; i < N_EACH; i++)
        step_of_both(l);
    steps_of_one_transform(l, 0);
}

/* The keys of sequence 0 move, and later keys get the transform of keys that moved. */
static void steps_after_a_shift(life *l)
{
    llama_memory_t memory = llama_get_memory(l->context);
    const int by = N_AT_ONCE;

    assert_true(llama_memory_seq_rm(memory, 0, FIRST, FIRST + by));
    llama_memory_seq_add(memory, 0, FIRST + by, -1, -by);
    l->ends[0] -= by;
    steps_of_one_transform(l, 0);
    step_of_both(l);
}

/* Other tokens make other transforms, to which a state brings its own. */
static void steps_after_a_restored_state(life *l)
{
    size_t size;
    uint8_t *state = harness_save_sequence(l->context, 0, &size);
    const llama_pos end = l->ends[0];

    llama_memory_clear(llama_get_memory(l->context), true);
    l->ends[0] = l->ends[1] = 0;
    for (int i = 0; i < 4; i++)
        prompt(l, 1, N_AT_ONCE);
    steps_of_one_transform(l, 1);
    assert_int_equal(llama_state_seq_set_data(l->context, state, size, 0), size);
    l->ends[0] = end;
    free(state);
    step_of_both(l);
    steps_of_one_transform(l, 0);
    steps_of_one_transform(l, 1);
}

static life run(const char *spec, bool unified, bool captured)
{
    const harness_options options = {
        .spec = spec, .n_ctx = unified ? 4096 : 8192, .n_seq = 2, .unified = unified
    };
    life l = { .logits = malloc(MOST_LOGITS * harness_n_vocab() * sizeof(*l.logits)) };

    assert_non_null(l.logits);
    setenv("KVANT_GRAPH", captured ? "1" : "0", 1);
    l.context = harness_context(&options);
    steps_of_several_transforms(&l);
    steps_after_a_shift(&l);
    steps_after_a_restored_state(&l);
    llama_free(l.context);
    unsetenv("KVANT_GRAPH");
    return l;
}

/* With one stream, tokens of both sequences may lie in one block, and then have one transform. */
static void same_bits(const char *spec, bool unified)
{
    life parts = run(spec, unified, false), captured = run(spec, unified, true);

    assert_int_equal(captured.n, parts.n);
    assert_memory_equal(captured.logits, parts.logits,
                        (size_t)parts.n * harness_n_vocab() * sizeof(*parts.logits));
    free(parts.logits);
    free(captured.logits);
}

CASE(captured_graphs_give_the_same_bits)
{
    same_bits("", true);
}

CASE(streams_take_turns_with_the_same_bits)
{
    same_bits("int-8:transform=first", false);
}

/* Logits after a prompt of 840 tokens. earlier: batches of another prompt, after which the cache is
 * cleared, also while the GPU learns from it. */
static life run_after(int earlier)
{
    const harness_options options = { .spec = "", .n_ctx = 2048 };
    life l = { .logits = malloc(MOST_LOGITS * harness_n_vocab() * sizeof(*l.logits)) };

    assert_non_null(l.logits);
    l.context = harness_context(&options);
    for (int i = 0; i < earlier; i++)
        prompt(&l, 0, N_AT_ONCE + 1);
    llama_memory_clear(llama_get_memory(l.context), true);
    for (l.ends[0] = 0; l.ends[0] < 5 * N_AT_ONCE;)
        prompt(&l, 0, N_AT_ONCE);
    steps_of_one_transform(&l, 0);
    llama_free(l.context);
    return l;
}

CASE(lessons_that_are_cleared_leave_nothing)
{
    const life clean = run_after(0);

    for (int earlier = 1; earlier < 6; earlier++) {
        life l = run_after(earlier);
        assert_memory_equal(l.logits, clean.logits,
                            N_EACH * harness_n_vocab() * sizeof(*clean.logits));
        free(l.logits);
    }
    free(clean.logits);
}

static int start_tiny(void **state)
{
    harness_need_gpu();
    if (!harness_has_mock() || start(state) != 0)
        return -1;
    harness_load_tiny("llama");
    harness_tokens(tokens, N_PROMPT + N_STEPS);
    return 0;
}

RUN_CASES(start_tiny, harness_stop)
