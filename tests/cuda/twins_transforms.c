/* twins_transforms.c - see twins.h: blocks with several transforms in one cache. Two caches learn
 * from different rows. A third cache imports blocks of both. */
#include "twins.h"

#include "../../src/cache/device.h"
#include "../../src/cache/tensor.h"

enum { SEQUENCES_HERE = 2, LONG = 128 };

/* Rows of values and keys. Channel i has the mean `shift` times 1 or -1, and each channel has
 * another spread. */
static float *shifted_rows(uint32_t n, float shift)
{
    float *rows = random_rows((size_t)n * WIDTH, 0.5f);
    for (size_t i = 0; i < (size_t)n * WIDTH; i++)
        rows[i] = rows[i] * (1 + shift * (float)(i % 5)) + (i % 2 ? shift : -shift);
    return rows;
}

static void append_shifted(twins *t, float shift)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        float *k = shifted_rows(LONG, shift), *v = shifted_rows(LONG, shift);
        assert_int_equal(twins_append_rows(t, 0, layer, k, v, LONG), KVANT_OK);
        free(k);
        free(v);
    }
}

/* The devices choose a matrix by different samples. They agree about rows like the rows that the
 * matrix was made of. */
static void source_open(twins *t, const spec_pair *spec, float shift)
{
    const bool matrices = strstr(spec->k, "transform=first") != NULL;
    twins_new(t, spec, SEQUENCES);
    if (matrices)
        twins_learn(t);
    assert_int_equal(kvant_sequence_create(t->cpu), 0);
    assert_int_equal(kvant_sequence_create(t->gpu), 0);
    if (matrices)
        assert_true(twins_append(t, 0, LONG));
    else
        append_shifted(t, shift);
}

/* The first block of a source, on both devices. */
static kvant_status import_first(twins *t, int32_t s, twins *source)
{
    const size_t used = twins_export(source, 0, 0);
    const kvant_status status = kvant_sequence_import(t->gpu, s, source->of_cpu, used);
    if (status == KVANT_OK)
        assert_int_equal(kvant_sequence_import(t->cpu, s, source->of_gpu, used), KVANT_OK);
    return status;
}

/* Gives the CPU as much room as a GPU has for imported transforms (twins_new). */
static void set_transforms(const kvant_cache *cache)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t v = 2; v < 4; v++)
            kvant_cache_tensor(cache, layer, KVANT_ROLE_V)[0]->transforms[v].alive = false;
}

static void open_all(twins *t, twins sources[2], const spec_pair *spec)
{
    for (int i = 0; i < 2; i++)
        source_open(&sources[i], spec, i ? 0.75f : -0.25f);
    twins_new(t, spec, SEQUENCES);
    set_transforms(t->cpu);
    for (int32_t s = 0; s < SEQUENCES_HERE; s++) {
        assert_int_equal(kvant_sequence_create(t->cpu), s);
        assert_int_equal(kvant_sequence_create(t->gpu), s);
    }
}

static void close_all(twins *t, twins sources[2])
{
    twins_free(t);
    twins_free(&sources[0]);
    twins_free(&sources[1]);
}

static void attend_somehow(twins *t, int32_t s)
{
    static const attention_problem problems[] = { { .query_tokens = 1, .causal = true },
                                                  { .query_tokens = 1, .sinks = true },
                                                  { .query_tokens = 1, .softcap = 30 } };
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            twins_attend(t, s, layer, &problems[i]);
    assert_true(t->most_parts >= 2);
}

void twins_transforms(const spec_pair *spec)
{
    static const int32_t both[] = { 0, 1 };
    twins t, sources[2];
    kvant_steps_info info = { .size = sizeof info };
    open_all(&t, sources, spec);
    for (int32_t s = 0; s < SEQUENCES_HERE; s++) {
        assert_int_equal(import_first(&t, s, &sources[s]), KVANT_OK);
        assert_int_equal(import_first(&t, s, &sources[1 - s]), KVANT_OK);
        assert_true(twins_append(&t, s, 20));
    }
    twins_compare(&t);
    for (int32_t s = 0; s < SEQUENCES_HERE; s++) {
        twins_attend_rows(&t, s, 20);
        if (!strstr(spec->k, "transform=first"))
            attend_somehow(&t, s);
    }
    if (!strstr(spec->v, "center=first"))
        twins_take_steps(&t, 8, 0);
    else
        assert_int_equal(kvant_steps_begin(t.gpu, both, 2, &info), KVANT_ERR_UNSUPPORTED);
    close_all(&t, sources);
}

void twins_scales(const spec_pair *spec)
{
    twins t, sources[2];
    open_all(&t, sources, spec);
    assert_int_equal(import_first(&t, 0, &sources[0]), KVANT_OK);
    assert_int_equal(import_first(&t, 1, &sources[1]), KVANT_ERR_FULL);
    assert_non_null(strstr(kvant_error_message(), "transform id"));
    assert_int_equal(import_first(&t, 1, &sources[0]), KVANT_OK);
    twins_attend_rows(&t, 1, 20);
    close_all(&t, sources);
}
