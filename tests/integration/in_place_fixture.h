/* in_place_fixture.h - contexts that may be f16 in place, for the tests of gpu/in_place.h and
 * cpu_in_place.h. Include it after _POSIX_C_SOURCE and N_TEXT, the length of the text. */
#ifndef KVANT_TESTS_IN_PLACE_FIXTURE_H
#define KVANT_TESTS_IN_PLACE_FIXTURE_H

#include "harness.h"

#define N_CTX 1024

static llama_token tokens[N_TEXT];

static inline int start_with_text(void **state)
{
    int result = harness_start(state);

    if (result == 0)
        harness_tokens(tokens, N_TEXT);
    return result;
}

static inline struct llama_context *new_context(const char *spec, const char *exact, uint32_t n_seq)
{
    const harness_options options = {
        .spec = spec, .n_ctx = N_CTX, .n_seq = n_seq, .unified = n_seq > 1
    };

    setenv("KVANT_EXACT", exact, 1);
    return harness_context(&options);
}

/* Decodes tokens first .. first + n - 1 of the text, in steps of `step`. With out NULL no logits
 * are kept. */
static inline void feed(struct llama_context *context, int first, int n, int step, llama_pos pos,
                        llama_seq_id seq, float *out)
{
    for (int i = 0, some; i < n; i += some) {
        some = n - i < step ? n - i : step;
        harness_decode(context, tokens + first + i, some, pos + i, seq, true);
        if (out != NULL)
            memcpy(out + (size_t)i * harness_n_vocab(), llama_get_logits(context),
                   (size_t)some * harness_n_vocab() * sizeof(float));
    }
}

/* A story: operations on a context, and the logits of its last n tokens. */
typedef struct story {
    void (*tell)(struct llama_context *context, float *logits);
    int n;
    uint32_t n_seq;
} story;

static inline float *hear_story(const story *of, const char *spec, const char *exact)
{
    struct llama_context *context = new_context(spec, exact, of->n_seq);
    float *logits = harness_new_logits(of->n);

    of->tell(context, logits);
    llama_free(context);
    return logits;
}

static inline bool is_same(const float *a, const float *b, int n)
{
    return memcmp(a, b, (size_t)n * harness_n_vocab() * sizeof(*a)) == 0;
}

/* On a real GPU, ggml-cuda sums in another order than llama.cpp's CPU back end. The KLD is below
 * 1e-5 then, which is less than with int-8 (3e-5). */
static inline void assert_same(const float *a, const float *b, int n)
{
    if (harness_has_mock() || !harness_on_gpu())
        assert_memory_equal(a, b, (size_t)n * harness_n_vocab() * sizeof(*a));
    else
        assert_true(harness_mean_kld(a, b, n) < 1e-5);
}

#endif /* KVANT_TESTS_IN_PLACE_FIXTURE_H */
