/* in_place_layers.h - contexts whose layers go from f16 in place to compressed pages one after
 * another, for the tests of gpu/hand_over.c and cpu_in_place.c. Include it after cmocka.h, with
 * _POSIX_C_SOURCE. */
#ifndef KVANT_TESTS_IN_PLACE_LAYERS_H
#define KVANT_TESTS_IN_PLACE_LAYERS_H

#define N_TEXT 500
#include "in_place_fixture.h"

/* All codecs have room for 256 of 1024 cells. The model has 4 layers. So on one device the first
 * layer goes before the token in cell 252, because 3 cells are left after it. The last layer goes
 * before the token in cell 255. With two GPUs the first GPU has a cache with 3 of the layers,
 * because llama.cpp counts the model's output as a fifth layer. */
#define ROOM 256
#define EXACT "256"
#define N_LAYERS 4
#define PROMPT 224

static inline int start(void **state)
{
    int result = start_with_text(state);

    if (result == 0)
        assert_int_equal(llama_model_n_layer(harness_model()), N_LAYERS);
    return result;
}

/* Number of layers in the first GPU's cache. */
static inline int n_layers(void)
{
    return harness_gpus() > 1 ? 3 : N_LAYERS;
}

static inline int first_to_go(void)
{
    return ROOM - n_layers();
}

static inline void a_text(struct llama_context *context, float *logits)
{
    feed(context, 0, PROMPT, 100, 0, 0, NULL);
    feed(context, PROMPT, 100, 1, PROMPT, 0, logits);
}

static inline float *hear(void (*tell)(struct llama_context *context, float *logits), int n,
                          const char *spec, const char *exact, uint32_t n_seq)
{
    struct llama_context *context = new_context(spec, exact, n_seq);
    float *logits = harness_new_logits(n);

    tell(context, logits);
    llama_free(context);
    return logits;
}

/* Both caches have the same codec for the same rows. While some layers are in place, fewer layers
 * have its error. The factor allows for centres and exact blocks, which depend on when rows came.
 * 1e-5 allows for KLDs that are as small as rounding. */
static inline void assert_as_good(const char *what, const float *stock, const float *ours,
                                  const float *compressed, int n)
{
    const double a = harness_mean_kld(stock, ours, n);
    const double b = harness_mean_kld(stock, compressed, n);

    print_message("%s: KLD %.6f, compressed from the start %.6f\n", what, a, b);
    assert_true(isfinite(a) && a <= 2 * b + 1e-5);
}

#define HALF (ROOM - 2) /* number of written cells when a cache has two layers in place */

static inline void feed_half(struct llama_context *context)
{
    feed(context, 0, PROMPT, 100, 0, 0, NULL);
    feed(context, PROMPT, HALF - PROMPT, 1, PROMPT, 0, NULL);
}

static inline void a_prompt(struct llama_context *context, float *logits)
{
    feed_half(context);
    feed(context, HALF, 60, 60, HALF, 0, logits);
}

#endif /* KVANT_TESTS_IN_PLACE_LAYERS_H */
