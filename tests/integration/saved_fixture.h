/* saved_fixture.h - contexts with a prompt, saved states, and the next tokens' logits, for tests of
 * saved states. */
#ifndef KVANT_TESTS_SAVED_FIXTURE_H
#define KVANT_TESTS_SAVED_FIXTURE_H

#include <sys/mman.h>
#include <unistd.h>

#include "harness.h"

enum { N_PROMPT = 450, N_SINGLE = 70, N_NEXT = 16, N_OTHER = 90, MOST = 2048 };

static llama_token tokens[MOST];

static inline size_t logits_bytes(void)
{
    return N_NEXT * harness_n_vocab() * sizeof(float);
}

/* Logits of N_NEXT tokens after the n tokens that the sequence holds; the caller frees them. */
static inline float *continue_from(struct llama_context *context, int n, llama_seq_id seq)
{
    float *logits = malloc(logits_bytes());

    assert_non_null(logits);
    harness_decode(context, tokens + n, N_NEXT, n, seq, true);
    memcpy(logits, llama_get_logits(context), logits_bytes());
    return logits;
}

/* Decodes n tokens in sequence 0. The last ones of many come one by one, so that rows leave the
 * exact part as they do when a model answers. */
static inline void prompt_into(struct llama_context *context, int n)
{
    const int one_by_one = n > 300 ? n - N_SINGLE : n;

    harness_decode(context, tokens, one_by_one, 0, 0, false);
    for (int i = one_by_one; i < n; i++)
        harness_decode(context, tokens + i, 1, i, 0, false);
}

static inline struct llama_context *prompted(const harness_options *options, int n)
{
    struct llama_context *context = harness_context(options);

    prompt_into(context, n);
    return context;
}

/* Memory that is not malloc's, so that mincore() tells which of its pages take memory. */
typedef struct saved {
    uint8_t *data;
    size_t size, room;
} saved;

static inline saved save(struct llama_context *context, llama_seq_id seq)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    saved s = { .size = llama_state_seq_get_size(context, seq) };

    s.room = (s.size + page - 1) / page * page;
    s.data = mmap(NULL, s.room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(s.data != MAP_FAILED);
    memset(s.data, 1, s.room); /* as a std::vector does, and nothing of it may stay */
    assert_int_equal(llama_state_seq_get_data(context, s.data, s.size, seq), s.size);
    return s;
}

static inline void assert_continues_after(struct llama_context *context, int n, llama_seq_id seq,
                                          const float *expected, const char *spec)
{
    float *logits = continue_from(context, n, seq);

    if (memcmp(expected, logits, logits_bytes()) != 0)
        fail_msg("%s after %d tokens: rms difference %g", spec, n,
                 harness_rms_difference(expected, logits, N_NEXT * harness_n_vocab()));
    free(logits);
}

static inline size_t resident(const saved *s)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), n = s->room / page;
    unsigned char *state = malloc(n);
    size_t bytes = 0;

    assert_non_null(state);
    assert_int_equal(mincore(s->data, s->room, state), 0);
    for (size_t i = 0; i < n; i++)
        bytes += (state[i] & 1u) * page;
    free(state);
    return bytes;
}

static inline void drop(saved *s)
{
    munmap(s->data, s->room);
}

static inline size_t restore(struct llama_context *context, const saved *s, llama_seq_id seq)
{
    return llama_state_seq_set_data(context, s->data, s->size, seq);
}

/* Tests of caches in GPU memory. Presets keep up to 12 blocks exact there. */

enum { N_LONG = 1300, BLOCK = 64 };

/* Group setup. */
static inline int start_on_gpu(void **state)
{
    int status;

    setenv("KVANT_STATES", "codes", 1);
    setenv("KVANT_EXACT", "0", 1);
    harness_need_gpu();
    status = harness_start(state);
    if (status == 0)
        harness_tokens(tokens, MOST);
    return status;
}

/* The next logits after n tokens with llama.cpp's own rows. */
static inline float *exact_logits(int n)
{
    const harness_options plain = { .spec = "f16", .n_ctx = 2048 };
    struct llama_context *context = prompted(&plain, n);
    float *logits = continue_from(context, n, 0);

    llama_free(context);
    return logits;
}

/* Rows that are decoded and stored like new rows are quantised once more. The second error is about
 * as large as the first one, so the factor of 2 leaves room for the scatter of errors. */
static inline void assert_quantised_twice(const float *exact, const float *original,
                                          const float *restored, const char *what)
{
    const size_t n = N_NEXT * harness_n_vocab();
    const double error = harness_rms_difference(original, restored, n),
                 most = 2 * harness_rms_difference(original, exact, n);

    print_message("%s: difference %g, at most %g\n", what, error, most);
    assert_true(isfinite(restored[0]));
    assert_true(error > 0);
    assert_true(error <= most);
}

#endif /* KVANT_TESTS_SAVED_FIXTURE_H */
