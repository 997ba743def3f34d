/* test_cuda_codec.c - tests that need no GPU: which codecs are accepted and refused, their sizes,
 * the byte codebooks, and argument checks before any launch. */
#include "cuda_support.h"

#include "../../src/cuda/params.h"

CASE(test_refusals)
{
    static const struct {
        const char *spec;
        uint32_t head_dim;
        kvant_status status;
        const char *word;
    } cases[] = {
        { "turboquant-4", 96, KVANT_ERR_UNSUPPORTED, "rotate=hadamard" },
        { "turboquant-4:rotate=none", 72, KVANT_ERR_UNSUPPORTED, "head_dim 72" },
        { "turboquant-4:nonsense", 128, KVANT_ERR_SPEC, "nonsense" },
        { "octopus-4", 96, KVANT_ERR_UNSUPPORTED, "rotate=hadamard" },
        { "trellis-4", 96, KVANT_ERR_UNSUPPORTED, "rotate=hadamard" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvant_cuda_codec *codec = (kvant_cuda_codec *)1;
        char text[256] = "";
        assert_int_equal(kvant_cuda_codec_create(cases[i].spec, cases[i].head_dim, KVANT_ROLE_K, 0,
                                                 &codec, text, sizeof text),
                         cases[i].status);
        assert_null(codec);
        if (!strstr(text, cases[i].word))
            fail_msg("%s: '%s' does not say '%s'", cases[i].spec, text, cases[i].word);
    }
}

CASE(test_info)
{
    kvant_codec *cpu = NULL;
    kvant_cuda_codec *gpu = NULL;
    kvant_codec_info a = { .size = sizeof a }, b = { .size = sizeof b };
    assert_int_equal(kvant_codec_create("bdr-4:block=64", 128, KVANT_ROLE_V, 1, &cpu, NULL, 0),
                     KVANT_OK);
    assert_int_equal(kvant_cuda_codec_from(cpu, &gpu, NULL, 0), KVANT_OK);
    assert_int_equal(kvant_codec_get_info(cpu, &a), KVANT_OK);
    assert_int_equal(kvant_cuda_codec_get_info(gpu, &b), KVANT_OK);
    assert_string_equal(a.spec, b.spec);
    kvant_codec_free(&cpu);
    assert_int_equal(a.page_bytes, b.page_bytes);
    assert_true(strncmp(b.spec, "bdr-4:", 6) == 0);
    kvant_cuda_codec_free(&gpu);
    kvant_cuda_codec_free(&gpu);
    kvant_cuda_codec_free(NULL);
}

/* A byte codebook adds little to the codebook's own error. Rounding m = value / step errs by at
 * most half a step. The step of n levels is at most their largest value over 0.6 of the range,
 * where the search in params.c starts. */
CASE(test_byte_codebooks)
{
    static const uint32_t dims[] = { 64, 128, 256 };
    for (uint32_t bits = 2; bits <= 4; bits++)
        for (size_t i = 0; i < 3; i++) {
            char spec[32];
            kvant_cuda_codec *codec = NULL;
            snprintf(spec, sizeof spec, "turboquant-%u", bits);
            assert_int_equal(
                kvant_cuda_codec_create(spec, dims[i], KVANT_ROLE_K, 0, &codec, NULL, 0), KVANT_OK);
            const kvant_cuda_params *p = &codec->params;
            double range = bits == 4 ? 63 : 127, unit = p->values[(1u << bits) - 1] / (0.6 * range);
            for (uint32_t c = 0; c < 1u << bits; c++) {
                uint32_t byte = p->bytes[c / 4] >> 8 * (c % 4) & 255;
                assert_true(byte <= (bits == 4 ? 127u : 255u));
                assert_true(fabs(p->values[c] - p->step * (byte - (double)p->bias)) <= unit);
            }
            kvant_cuda_codec_free(&codec);
        }
}

/* The kernel computes the code of u as guess + (u > thresholds[guess]), which is right if the guess
 * is the code or one less. Its tanh may err by 2^-10 (twice the error in the PTX manual), so the
 * test tries both ends. It reads the guess from the float's bits, as the kernel does. */
static void check_guess(const kvant_cuda_params *p, float u)
{
    uint32_t code = 0;
    for (uint32_t k = 0; k + 1 < 1u << p->bits; k++)
        code += u > p->thresholds[k];
    for (int end = -1; end <= 1; end += 2) {
        double curve = tanh((double)(p->guess_slope * u)) * (1 + end * 0x1p-10);
        float sum = (float)(fmax(-1, fmin(1, curve)) * p->guess_gain + p->guess_middle);
        uint32_t bits, guess;
        memcpy(&bits, &sum, sizeof bits);
        guess = (bits & 0x78u) / 8;
        assert_true(guess + 1 < 1u << p->bits);
        assert_int_equal(guess + (u > p->thresholds[guess]), code);
    }
}

CASE(test_guesses)
{
    static const uint32_t dims[] = { 64, 96, 128, 256 };
    for (uint32_t bits = 2; bits <= 4; bits++)
        for (size_t i = 0; i < 4; i++) {
            char spec[40];
            kvant_cuda_codec *codec = NULL;
            snprintf(spec, sizeof spec, "turboquant-%u:rotate=hadamard", bits);
            assert_int_equal(
                kvant_cuda_codec_create(spec, dims[i], KVANT_ROLE_K, 0, &codec, NULL, 0), KVANT_OK);
            for (int step = -20000; step <= 20000; step++)
                check_guess(&codec->params, (float)step * 0.001f);
            for (uint32_t k = 0; k + 1 < 1u << bits; k++) {
                float t = codec->params.thresholds[k];
                check_guess(&codec->params, t);
                check_guess(&codec->params, nextafterf(t, 100));
                check_guess(&codec->params, nextafterf(t, -100));
            }
            check_guess(&codec->params, INFINITY);
            check_guess(&codec->params, -INFINITY);
            kvant_cuda_codec_free(&codec);
        }
}

/* Magnitudes are the magnitudes of the levels, and each remaining level is the negative of a level
 * in the list. */
CASE(test_magnitudes)
{
    for (uint32_t bits = 2; bits <= 4; bits++) {
        char spec[32];
        kvant_cuda_codec *codec = NULL;
        snprintf(spec, sizeof spec, "trellis-%u", bits);
        assert_int_equal(kvant_cuda_codec_create(spec, 128, KVANT_ROLE_K, 0, &codec, NULL, 0),
                         KVANT_OK);
        const kvant_cuda_trellis *t = &codec->trellis;
        const uint8_t *bytes = (const uint8_t *)codec->params.bytes;
        const uint32_t half = t->n_levels / 2;
        assert_int_equal(t->n_levels, 4u << bits);
        for (uint32_t i = 0; i < half; i++) {
            assert_true(bytes[i] < 128);
            assert_int_equal(t->levels[half + i], bytes[i] + (i < 16 ? 0 : bytes[i - 16]));
            assert_int_equal(t->levels[half - 1 - i], -t->levels[half + i]);
            assert_float_equal((float)t->values[half + i] * (float)t->per_deviation,
                               (float)t->levels[half + i], 1e-5);
        }
        kvant_cuda_codec_free(&codec);
    }
}

CASE(test_pairs)
{
    static const struct {
        const char *k, *v;
        uint32_t k_dim;
        kvant_role v_role;
        kvant_status status;
    } cases[] = {
        { "turboquant-4", "turboquant-3", 128, KVANT_ROLE_V, KVANT_OK },
        { "turboquant-4", "int-4", 128, KVANT_ROLE_V, KVANT_OK },
        { "int-8", "turboquant-2", 128, KVANT_ROLE_V, KVANT_OK },
        { "turboquant-3", "turboquant-4", 128, KVANT_ROLE_V, KVANT_OK },
        { "int-4", "int-8", 128, KVANT_ROLE_V, KVANT_OK },
        { "int-5", "int-5", 128, KVANT_ROLE_V, KVANT_OK },
        { "turboquant-6", "turboquant-6", 128, KVANT_ROLE_V, KVANT_OK },
        { "kivi-2", "kivi-2", 128, KVANT_ROLE_V, KVANT_OK },
        { "innerq-small", "innerq-small", 128, KVANT_ROLE_V, KVANT_OK },
        { "innerq-small", "kivi-2", 128, KVANT_ROLE_V, KVANT_OK },
        { "octopus-3", "octopus-3", 128, KVANT_ROLE_V, KVANT_OK },
        { "hqmq-s192r6", "hqmq-s192r6", 128, KVANT_ROLE_V, KVANT_OK },
        { "octopus-4", "octopus-3", 128, KVANT_ROLE_V, KVANT_OK },
        { "octopus-4", "turboquant-4", 128, KVANT_ROLE_V, KVANT_OK },
        { "trellis-4", "trellis-2", 128, KVANT_ROLE_V, KVANT_OK },
        { "trellis-3", "trellis-4", 128, KVANT_ROLE_V, KVANT_OK },
        { "trellis-4", "turboquant-4", 128, KVANT_ROLE_V, KVANT_OK },
        { "int-4", "int-4", 64, KVANT_ROLE_V, KVANT_ERR_ARGUMENT },
        { "int-4", "int-4", 128, KVANT_ROLE_K, KVANT_ERR_ARGUMENT },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvant_cuda_codec *k = NULL, *v = NULL;
        char text[200] = "";
        kvant_cuda_codec_create(cases[i].k, cases[i].k_dim, KVANT_ROLE_K, 0, &k, NULL, 0);
        kvant_cuda_codec_create(cases[i].v, 128, cases[i].v_role, 0, &v, NULL, 0);
        assert_non_null(k);
        assert_non_null(v);
        assert_int_equal(kvant_cuda_attention_check(k, v, text, sizeof text), cases[i].status);
        assert_int_equal(text[0] != 0, cases[i].status != KVANT_OK);
        kvant_cuda_codec_free(&k);
        kvant_cuda_codec_free(&v);
    }
    assert_int_equal(kvant_cuda_attention_check(NULL, NULL, NULL, 0), KVANT_ERR_ARGUMENT);
}

CASE(test_argument_checks)
{
    kvant_cuda_attention_args attention = { .size = sizeof attention };
    kvant_cuda_append_args append = { .size = sizeof append };
    kvant_cuda_decode_args decode = { .size = 3 };
    assert_int_equal(kvant_cuda_attention(NULL, NULL), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cuda_attention(&attention, NULL), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cuda_append(&append, NULL), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cuda_decode(&decode, NULL), KVANT_ERR_ARGUMENT);
}

CASE(test_open_codec)
{
    kvant_cuda_codec *sealed = NULL, *open = (kvant_cuda_codec *)1, *values = NULL;
    kvant_codec_info info = { .size = sizeof info };
    assert_int_equal(kvant_cuda_codec_create("kivi-2", 96, KVANT_ROLE_K, 0, &sealed, NULL, 0),
                     KVANT_OK);
    assert_int_equal(kvant_cuda_codec_create("kivi-2", 96, KVANT_ROLE_V, 0, &values, NULL, 0),
                     KVANT_OK);
    assert_int_equal(kvant_cuda_codec_create_open(NULL, &open), KVANT_ERR_ARGUMENT);
    assert_null(open);
    assert_int_equal(kvant_cuda_codec_create_open(sealed, NULL), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cuda_codec_create_open(sealed, &open), KVANT_OK);
    assert_int_equal(kvant_cuda_codec_get_info(open, &info), KVANT_OK);
    assert_string_equal(info.spec, "f16");
    assert_int_equal(info.page_bytes, 64 * 96 * 2);
    assert_int_equal(info.block_tokens, 1);
    assert_int_equal(info.role, KVANT_ROLE_K);
    assert_int_equal(kvant_cuda_attention_check(open, values, NULL, 0),
                     KVANT_ERR_ARGUMENT); /* only one of keys and values is exact */
    kvant_cuda_codec_free(&sealed);
    kvant_cuda_codec_free(&values);
    kvant_cuda_codec_free(&open);
}

/* Calls that are refused before any launch: their pointers are never followed. */
CASE(test_refused_calls)
{
    void *somewhere = (void *)(uintptr_t)4096;
    kvant_cuda_codec *codec = NULL, *open = NULL;
    assert_int_equal(kvant_cuda_codec_create("kivi-2", 128, KVANT_ROLE_K, 0, &codec, NULL, 0),
                     KVANT_OK);
    assert_int_equal(kvant_cuda_codec_create_open(codec, &open), KVANT_OK);
    kvant_cuda_pages pages = { somewhere, 1 << 20, 1 << 16 }, narrow = { somewhere, 64, 64 };
    kvant_cuda_append_args append = { .size = sizeof append,
                                      .n_tokens = 1,
                                      .n_kv_heads = 1,
                                      .slots = somewhere,
                                      .type = KVANT_CUDA_F16 };
    append.k = (kvant_cuda_rows){ .codec = codec, .pages = pages, .rows = somewhere };
    assert_int_equal(kvant_cuda_append(&append, NULL),
                     KVANT_ERR_UNSUPPORTED); /* groups of tokens */
    append.k = (kvant_cuda_rows){ .codec = open, .pages = narrow, .rows = somewhere };
    assert_int_equal(kvant_cuda_append(&append, NULL), KVANT_ERR_ARGUMENT);
    kvant_cuda_seal_args seal = {
        .size = sizeof seal, .n_blocks = 1, .n_kv_heads = 1, .from = somewhere, .to = somewhere
    };
    assert_int_equal(kvant_cuda_seal(NULL, NULL), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_cuda_seal(&seal, NULL), KVANT_ERR_ARGUMENT); /* no such role */
    seal.k = (kvant_cuda_seal_pages){ codec, narrow, pages };
    assert_int_equal(kvant_cuda_seal(&seal, NULL), KVANT_ERR_ARGUMENT); /* exact pages do not fit */
    seal.k = (kvant_cuda_seal_pages){ open, pages, pages };
    /* an exact page cannot be the target */
    assert_int_equal(kvant_cuda_seal(&seal, NULL), KVANT_ERR_ARGUMENT);
    seal.k = (kvant_cuda_seal_pages){ codec, pages, pages };
    seal.to = NULL;
    assert_int_equal(kvant_cuda_seal(&seal, NULL), KVANT_ERR_ARGUMENT);
    kvant_cuda_codec_free(&codec);
    kvant_cuda_codec_free(&open);
}

RUN_CASES(NULL, NULL)
