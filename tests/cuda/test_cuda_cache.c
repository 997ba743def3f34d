/* test_cuda_cache.c - a cache on the CPU and a cache on the GPU get the same calls (twins.h):
 * random appends, forks, truncations, dropped blocks, imports. Both export the same bytes, and
 * attention on the GPU stays within its bound.
 *
 * test_cuda_cache_host is this program on the mock device of tests/cuda/host, which needs no
 * GPU. */
#include "twins_random.h"

#include "../../src/codec/codec_internal.h"
#include "../../src/device/memory.h"
#include "../unit/calibrated.h"

static const spec_pair pairs[] = {
    { "turboquant-4", "turboquant-4", NULL, false, false, false, NULL, 0 },
    { "int-4", "int-4", NULL, false, false, false, NULL, 0 },
    { "turboquant-4", "int-4", NULL, false, false, false, NULL, 0 },
    { "trellis-4", "trellis-4", NULL, false, false, false, NULL, 0 },
    { "int-4:norm=file,sink=0", "int-4:center=file,norm=file,sink=0", NULL, true, false, false,
      NULL, 0 },
    { "trellis-4:transform=file,sink=0", "trellis-4:center=file,sink=0", "trellis-4:rotate=none",
      true, false, false, NULL, 0 },
    /* the presets small, balanced and quality, without and with a calibration */
    { "trellis-3:center=first,norm=first", "trellis-3", NULL, false, false, false, NULL, 0 },
    { "trellis-4:center=first,norm=first", "trellis-4", NULL, false, false, false, NULL, 0 },
    { "turboquant-6:center=first,norm=first", "trellis-4:center=first", NULL, false, true, false,
      NULL, 0 },
    { "trellis-4:transform=file", "trellis-4", "trellis-4:rotate=none", true, false, false, NULL,
      0 },
    { "turboquant-6:transform=file", "trellis-4:center=file", "turboquant-6:rotate=none", true,
      true, false, NULL, 0 },
};

/* Groups of tokens, windows, sinks, general forms. They belong to the long tests on a computer
 * without a GPU, where they take a minute. */
static const spec_pair more_pairs[] = {
#if KVANT_PAPERS
    { "kivi-2", "kivi-2", NULL, false, false, false, NULL, 0 },
    { "innerq-base", "innerq-base", NULL, false, false, false, NULL, 0 },
    { "innerq-small", "innerq-small", NULL, false, false, false, NULL, 0 },
#endif
    { "trellis-3:sink=3,recent=100", "trellis-3", NULL, false, false, false, NULL, 0 },
    { "turboquant-4:recent=40", "turboquant-4:sink=70,center=first", NULL, false, false, false,
      NULL, 0 },
#if KVANT_PAPERS
    { "octopus-4:rotate=hadamard", "int-4", NULL, false, false, false, NULL, 0 },
    /* the general form */
    { "turboquant-2.5", "turboquant-3.5", NULL, false, false, false, NULL, 0 },
    { "turboquant-3:qjl,rotate=hadamard,center=first", "innerq-hybrid", NULL, false, false, false,
      NULL, 0 },
    { "hqmq-s341r6:med3", "polar-4:rotate=hadamard,center=first", NULL, false, false, false, NULL,
      0 },
    { "octopus-5:split=4.7", "spherical-r4jl4", NULL, false, false, true, NULL, 0 },
    /* outliers of a page */
    { "hqmq-s96r4:med3,median=page,slots=16", "naive-4", NULL, false, false, false, NULL, 0 },
    /* rotations of a calibration: one for each kv head, and one for a layer */
    { "hessian-4", "hessian-4:pool=layer", "int-4:rotate=none", true, false, false, NULL, 0 },
    { "hqmq-s96r4", "trellis-4:center=first", NULL, false, false, false, NULL, 0 },
    /* a matrix that needs no calibration */
    { "hqmq-s96r4:order=halves,center=first", "hqmq-s96r4:order=halves", "hqmq-s96r4", false, false,
      false, NULL, 0 },
#endif
    /* dense rotations, which trellises and codebooks have if head_dim is no power of two */
    { "trellis-4:rotate=dense,center=first,norm=first", "trellis-4:rotate=dense,center=first", NULL,
      false, false, false, NULL, 0 },
    { "turboquant-4", "turboquant-4:rotate=dense,recent=30", NULL, false, false, false, NULL, 0 },
    /* feedback, at once behind exact pages and in whole blocks */
    { "turboquant-4:transform=file,feedback", "turboquant-4", "turboquant-4:rotate=none", true,
      false, false, NULL, 0 },
    { "turboquant-3:transform=file,feedback,recent=20", "int-4", "turboquant-3:rotate=none", true,
      false, false, NULL, 0 },
    /* no call waits for appended rows */
    { "turboquant-4", "int-4", NULL, false, false, true, NULL, 0 },
    { "trellis-4:center=first,norm=first", "trellis-3", NULL, false, false, true, NULL, 0 },
};

CASE(bytes_and_outputs_agree)
{
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        random_calls(&pairs[i], true);
}

CASE(bytes_and_more_agree)
{
    for (size_t i = 0; i < sizeof more_pairs / sizeof *more_pairs; i++)
        random_calls(&more_pairs[i], true);
}

/* A codec with a random window, centre, scale and rotation that both the CPU and the GPU have. */
static void random_spec(kvant_role role, char spec[96])
{
    static const char *const families[] = { "int-%u", "bdr-%u", "turboquant-%u", "trellis-%u",
                                            PAPERS("octopus-%u", "hqmq-s96r4", "hqmq-s192r6",
                                                   "kivi-2", "kivi-4", "innerq-base",
                                                   "innerq-small", "innerq-hybrid",
                                                   "turboquant-2.5", "turboquant-3.5", "polar-%u",
                                                   "octopus-1", "octopus-5", "hqmq-s341r6",
                                                   "spherical-r4jl4", "addvq-k24r3", ) },
                             *const options[] = { "sink=%u",    "recent=%u",    "center=first",
                                                  "norm=first", "rotate=dense", "rotate=none" };
    for (;;) {
        kvant_codec *codec = NULL;
        kvant_cuda_codec *gpu = NULL;
        const char *family = families[random_bits() % (sizeof families / sizeof *families)];
        int n = snprintf(spec, 96, family, 1 + (uint32_t)(random_bits() % 8));
        const int plain = n;
        for (size_t i = 0; i < 6; i++)
            if (random_bits() % 3 == 0) {
                spec[n] = n == plain ? ':' : ',';
                n++;
                n +=
                    snprintf(spec + n, 96 - (size_t)n, options[i], (uint32_t)(random_bits() % 150));
            }
        const bool good = kvant_codec_create(spec, DIM, role, 0, &codec, NULL, 0) == KVANT_OK &&
                          kvant_cuda_codec_unrotated(codec, &gpu, NULL, 0) == KVANT_OK;
        kvant_cuda_codec_free(&gpu);
        kvant_codec_free(&codec);
        if (good)
            return;
    }
}

CASE(random_codecs_agree)
{
    for (int i = 0; i < 12; i++) {
        char k[96], v[96];
        random_spec(KVANT_ROLE_K, k);
        random_spec(KVANT_ROLE_V, v);
        const spec_pair pair = { .k = k, .v = v, .asynchronous = i % 3 == 0 };
        random_calls(&pair, false);
    }
}

#if KVANT_PAPERS
/* The reference of outputs has one codec for the values of all kv heads, so this test compares only
 * bytes. */
CASE(heads_differ)
{
    static const spec_pair differing[] = {
        { .k = "int-4", .v = "hessian-4", .calibrated = true },
        { .k = "kmeans-4:c=4", .v = "kmeans-3:c=257", .calibrated = true },
        { .k = "kmeans-4:c=1,recent=30", .v = "int-4", .calibrated = true }
    };
    for (int i = 0; i < 3; i++)
        random_calls(&differing[i], false);
}
#endif

/* A refused row does not change the length, and later rows take its slots. */
static void refuse_rows(const spec_pair *pair)
{
    static const float bad[] = { NAN, 3e38f };
    twins t;
    twins_new(&t, pair, SEQUENCES);
    kvant_sequence_create(t.cpu);
    kvant_sequence_create(t.gpu);
    twins_append(&t, 0, 100);
    for (size_t i = 0; i < 2; i++) {
        float *good = random_rows(7 * WIDTH, 0.5f), *k = random_rows(7 * WIDTH, 0.5f);
        k[5 * WIDTH + 3] = bad[i];
        const kvant_status want = i ? KVANT_ERR_RANGE : KVANT_ERR_NONFINITE;
        assert_int_equal(twins_append_rows(&t, 0, 0, k, good, 7), want);
        assert_non_null(strstr(kvant_error_message(), "layer 0"));
        assert_int_equal(twins_append_rows(&t, 0, 0, good, k, 7), want);
        assert_int_equal(twins_length(&t, 0), 100 + 30 * i);
        twins_append(&t, 0, 30);
        twins_compare(&t);
        free(good);
        free(k);
    }
    twins_free(&t);
}

/* The next call reports the refusal, and the slots stay empty. */
static void refuse_rows_later(const spec_pair *pair)
{
    static const float bad[] = { NAN, 3e38f };
    static float out[Q_WIDTH], again[Q_WIDTH];
    twins t;
    twins_new(&t, pair, SEQUENCES);
    kvant_sequence_create(t.gpu);
    float *rows = random_rows(7 * WIDTH, 0.5f), *q = random_rows(Q_WIDTH, 1);
    void *good = device_copy(rows, 7 * WIDTH * sizeof *rows),
         *gpu_q = device_copy(q, Q_WIDTH * sizeof *q), *gpu_out = device_new(sizeof out, 0);
    for (size_t i = 0; i < 2; i++) {
        const kvant_status want = i ? KVANT_ERR_RANGE : KVANT_ERR_NONFINITE;
        const float kept = rows[5 * WIDTH + 3];
        rows[5 * WIDTH + 3] = bad[i];
        void *with_bad = device_copy(rows, 7 * WIDTH * sizeof *rows);
        rows[5 * WIDTH + 3] = kept;
        assert_int_equal(kvant_cache_append(t.gpu, 0, 0, with_bad, good, 7), KVANT_OK);
        device_read(again, gpu_out, sizeof again); /* the row has been checked */
        assert_int_equal(i ? kvant_cache_append(t.gpu, 0, 0, good, good, 7)
                           : kvant_cache_attend(t.gpu, 0, 0, gpu_q, gpu_out, 1),
                         want);
        assert_int_equal(kvant_sequence_length(t.gpu, 0, 0), 7 * (uint32_t)(i + 1));
        assert_int_equal(kvant_cache_attend(t.gpu, 0, 0, gpu_q, gpu_out, 1), KVANT_OK);
        device_read(i ? again : out, gpu_out, sizeof out);
        for (uint32_t j = 0; j < Q_WIDTH; j++)
            assert_true(isfinite(i ? again[j] : out[j]));
        cudaFree(with_bad);
    }
    assert_int_equal(kvant_cache_append(t.gpu, 0, 0, good, good, 7), KVANT_OK);
    cudaFree(good);
    cudaFree(gpu_q);
    cudaFree(gpu_out);
    free(rows);
    free(q);
    twins_free(&t);
}

CASE(refused_rows_leave_no_trace)
{
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        (pairs[i].asynchronous ? refuse_rows_later : refuse_rows)(&pairs[i]);
}

CASE(rows_beyond_half_are_refused)
{
    static const spec_pair pairs_of[] = {
        { .k = "trellis-4", .v = "trellis-4" },
        { .preset = "small", .k = "trellis-3:transform=first", .v = "trellis-3" },
        { .preset = "balanced",
          .k = "trellis-4:transform=file",
          .v = "trellis-4",
          .calibrated = true },
    };
    for (size_t i = 0; i < sizeof pairs_of / sizeof *pairs_of; i++)
        twins_beyond_half(&pairs_of[i]);
}

/* A block that was sealed, cut and filled again is incomplete, because its old slots were not
 * written again. If the pool has too many of such blocks, they are sealed nevertheless, and old
 * slots keep their bytes. */
CASE(cut_blocks_are_sealed_again)
{
    static const uint32_t grown[] = { 330, 330, 460, 590, 630 },
                          cut[] = { 100, 228, 356, 484, 600 };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        twins t;
        twins_new(&t, &pairs[i], 1);
        kvant_sequence_create(t.cpu);
        kvant_sequence_create(t.gpu);
        for (int step = 0; step < 5; step++) {
            while (twins_length(&t, 0) < grown[step])
                assert_true(twins_append(&t, 0,
                                         grown[step] - twins_length(&t, 0) < 20
                                             ? grown[step] - twins_length(&t, 0)
                                             : 20));
            twins_compare(&t);
            assert_int_equal(kvant_sequence_truncate(t.cpu, 0, cut[step]), KVANT_OK);
            assert_int_equal(kvant_sequence_truncate(t.gpu, 0, cut[step]), KVANT_OK);
        }
        const attention_problem p = { .query_tokens = 3, .causal = true };
        twins_attend(&t, 0, 0, &p);
        twins_free(&t);
    }
}

/* Appends tokens to every layer. Keys are rows first to end - 1 of `rows`; values lie MOST rows
 * later. */
static void append_given(twins *t, int32_t s, const float *rows, uint32_t first, uint32_t end)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        const float *k = rows + (size_t)first * WIDTH, *v = k + (size_t)MOST * WIDTH;
        assert_int_equal(twins_append_rows(t, s, layer, k, v, end - first), KVANT_OK);
    }
}

/* The last block of 70 tokens, of a sequence that had 100, of its fork, and of a sequence that
 * never had more: both devices export equal bytes. The first 64 tokens come in one call, so that
 * all learn the same. */
static void export_cut(const spec_pair *pair, const float *rows, bool fork)
{
    twins t, clean;
    twins_new(&t, pair, SEQUENCES);
    twins_new(&clean, pair, SEQUENCES);
    for (twins *each[] = { &t, &clean }, **one = each; one < each + 2; one++) {
        kvant_sequence_create((*one)->cpu);
        kvant_sequence_create((*one)->gpu);
        append_given(*one, 0, rows, 0, 64);
        append_given(*one, 0, rows, 64, 70);
    }
    append_given(&t, 0, rows, 70, 100);
    if (fork)
        fork_one(&t, 0);
    assert_int_equal(kvant_sequence_truncate(t.cpu, fork, 70), KVANT_OK);
    assert_int_equal(kvant_sequence_truncate(t.gpu, fork, 70), KVANT_OK);
    const size_t used = twins_export(&t, fork, 1), want = twins_export(&clean, 0, 1);
    if (used != want || memcmp(t.of_gpu, clean.of_gpu, used) != 0)
        fail_msg("%s / %s, %s: other bytes", pair->k, pair->v, fork ? "a fork" : "cut");
    twins_free(&t);
    twins_free(&clean);
}

CASE(cut_sequences_export_their_tokens)
{
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        float *rows = random_rows(2 * (size_t)MOST * WIDTH, 0.02f);
        export_cut(&pairs[i], rows, false);
        export_cut(&pairs[i], rows, true);
        free(rows);
    }
}

/* Sealed and exact blocks with transforms move from the CPU to the GPU and from the GPU to the
 * CPU. */
static void change_devices(const spec_pair *pair)
{
    twins t, other;
    twins_new(&t, pair, SEQUENCES);
    twins_new(&other, pair, SEQUENCES);
    for (twins *each[] = { &t, &other }, **one = each; one < each + 2; one++) {
        kvant_sequence_create((*one)->cpu);
        kvant_sequence_create((*one)->gpu);
    }
    twins_append(&t, 0, 150);
    for (uint32_t block = 0; block < 3; block++) {
        const size_t used = twins_export(&t, 0, block);
        t.of_cpu[used / 2] ^= 1;
        assert_int_equal(kvant_sequence_import(other.gpu, 0, t.of_cpu, used), KVANT_ERR_FORMAT);
        t.of_cpu[used / 2] ^= 1;
        assert_int_equal(kvant_sequence_import(other.gpu, 0, t.of_cpu, used), KVANT_OK);
        assert_int_equal(kvant_sequence_import(other.cpu, 0, t.of_gpu, used), KVANT_OK);
    }
    twins_compare(&other);
    twins_append(&other, 0, 20);
    twins_append(&other, 0, 90);
    twins_compare(&other);
    const attention_problem p = { .query_tokens = 9, .causal = true };
    twins_attend(&other, 0, 1, &p);
    twins_free(&t);
    twins_free(&other);
}

CASE(blocks_change_devices)
{
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        change_devices(&pairs[i]);
}

static void refuses(uint32_t head_dim, const char *words)
{
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    kvant_cache *cache;
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS,
    params.head_dim = head_dim;
    params.max_tokens = MOST, params.device = "cuda", params.k = params.v = "int-4";
    const kvant_status status = kvant_cache_create(&params, &cache);
    if (status != KVANT_ERR_UNSUPPORTED)
        fail_msg("head_dim %u: status %d: %s", head_dim, status,
                 status == KVANT_OK ? "" : kvant_error_message());
    assert_null(cache);
    if (!strstr(kvant_error_message(), words) || !strstr(kvant_error_message(), "use a preset"))
        fail_msg("'%s' does not say '%s'", kvant_error_message(), words);
}

CASE(what_is_missing_is_refused)
{
    refuses(72, "not on the GPU: head_dim 72");
    twins t;
    twins_new(&t, &pairs[0], SEQUENCES);
    kvant_sequence_create(t.cpu);
    kvant_sequence_create(t.gpu);
    twins_append(&t, 0, 3);
    fixture none = { .p = { 0 } };
    float *q = device_new(4 * Q_WIDTH * sizeof *q, 0),
          *out = device_new(4 * Q_WIDTH * sizeof *q, 0);
    kvant_attention_problem problem = problem_of(&none, 1, q, out);
    problem.exact = true;
    assert_int_equal(kvant_cache_attention(t.gpu, 0, 0, &problem), KVANT_ERR_UNSUPPORTED);
    assert_non_null(strstr(kvant_error_message(), "exact"));
    assert_int_equal(kvant_cache_attend(t.gpu, 0, 0, q, out, 4), KVANT_ERR_ARGUMENT);
    assert_non_null(strstr(kvant_error_message(), "causal"));
    assert_int_equal(kvant_cache_attend(t.gpu, 0, 0, q, out, 3), KVANT_OK);
    const float still = 0;
    const kvant_rope rope = {
        .size = sizeof rope, .n_dims = 2, .frequencies = &still, .block_centers = 1
    };
    assert_int_equal(kvant_cache_set_rope(t.gpu, 0, &rope), KVANT_ERR_UNSUPPORTED);
    assert_non_null(strstr(kvant_error_message(), "block_centers"));
    assert_int_equal(kvant_cache_set_rope(t.cpu, 0, &rope), KVANT_OK);
    cudaFree(q);
    cudaFree(out);
    twins_free(&t);
}

CASE(steps_are_appends)
{
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        twins_steps(&pairs[i]);
}

static int save_calibration(void **unused)
{
    kvant_calibration *calibration = calibrate_fixed(DIM);
    const bool saved =
        calibration && kvant_calibration_save(calibration, CALIBRATION, NULL, 0) == KVANT_OK;
    kvant_calibration_free(&calibration);
    return saved ? 0 : -1;
}

static int remove_calibration(void **unused)
{
    return remove(CALIBRATION);
}

/* Long batches and their queries make the same matrices on both devices. */
CASE(matrices_agree)
{
    static const spec_pair first[] = {
        { .k = "trellis-4:transform=first", .v = "trellis-4" },
        { .k = "turboquant-6:transform=first", .v = "trellis-4:center=first" },
        { .k = "turboquant-4:rotate=dense,transform=first", .v = "turboquant-4:rotate=dense" },
        { .k = "turboquant-4:transform=first,recent=20",
          .v = "turboquant-4",
          .asynchronous = true },
    };
    for (size_t i = 0; i < sizeof first / sizeof *first; i++) {
        twins_steps(&first[i]);
        random_calls(&first[i], false);
    }
}

/* Presets, without a calibration and with one. */
CASE(first_and_newest_tokens_are_exact)
{
    static const spec_pair presets[] = {
        { .preset = "balanced",
          .k = "trellis-4:transform=first",
          .v = "trellis-4",
          .max_tokens = 2048 },
        { .preset = "quality",
          .k = "turboquant-6:transform=first",
          .v = "trellis-4:center=first",
          .max_tokens = 2048 },
        { .preset = "small",
          .k = "trellis-3:transform=first",
          .v = "trellis-3",
          .asynchronous = true,
          .max_tokens = 2048 },
        { .preset = "balanced",
          .k = "trellis-4:transform=file",
          .v = "trellis-4",
          .calibrated = true,
          .max_tokens = 2048 },
        { .preset = "quality",
          .k = "turboquant-6:transform=file",
          .v = "trellis-4:center=file",
          .calibrated = true,
          .max_tokens = 2048 },
    };
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++)
        twins_exact(&presets[i]);
    twins_plain_keys();
}

/* With pages for the exact part of one sequence of 640 tokens, which four sequences share. */
CASE(presets_agree)
{
    static const spec_pair presets[] = {
        { .preset = "balanced",
          .k = "trellis-4:transform=file",
          .v = "trellis-4",
          .transformed = "trellis-4:rotate=none",
          .calibrated = true },
        { .preset = "quality",
          .k = "turboquant-6:transform=file",
          .v = "trellis-4:center=file",
          .transformed = "turboquant-6:rotate=none",
          .calibrated = true,
          .decoded = true },
        { .preset = "small",
          .k = "trellis-3:transform=first",
          .v = "trellis-3",
          .asynchronous = true },
    };
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++) {
        random_calls(&presets[i], presets[i].calibrated);
        twins_steps(&presets[i]);
    }
}

/* Blocks with scales, matrices or centres of different texts take part in one call of attention. */
CASE(transforms_share_a_call)
{
    static const spec_pair sharing[] = {
        { .k = "int-4:center=first,norm=first", .v = "int-4" },
        { .k = "turboquant-4:center=first", .v = "trellis-4" },
        { .k = "turboquant-4:rotate=dense,center=first,norm=first", .v = "int-4" },
        { .k = "trellis-4:transform=first", .v = "trellis-4" },
        { .k = "int-4:center=first,norm=first", .v = "int-4:center=first" },
        { .k = "int-4", .v = "turboquant-4:rotate=dense,center=first" },
    };
    static const spec_pair scaled = { .k = "int-4", .v = "int-4:norm=first" };
    for (size_t i = 0; i < sizeof sharing / sizeof *sharing; i++)
        twins_transforms(&sharing[i]);
    twins_scales(&scaled);
}

RUN_CASES_ON_GPU(save_calibration, remove_calibration)
