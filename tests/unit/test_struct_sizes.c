/* test_struct_sizes.c - size fields of structs that cross the library's border. A caller compiled
 * against the first released header or against a newer header is served. A caller that requests a
 * feature that this version does not know is refused. The program test_cuda_struct_sizes tests the
 * functions for GPUs. */
#include <kvant/block_attention.h>
#include <kvant/cache.h>
#include <kvant/calibration.h>
#include <kvant/index.h>
#include <kvant/settings.h>
#include <kvant/tensor_hooks.h>

#include "attend.h"
#include "sized.h"

/* Tensors */

/* The memory on which these calls work: 150 tokens of keys and values, and memory for anything
 * else. */
static struct {
    fixture k, v;
    void *memory;
    kvant_tensor_params params;
    kvant_attention_problem problem;
    kvant_block_rows rows;
    kvant_scheme *scheme;
    float q[2 * N_HEADS * HEAD_DIM];
    attended got;
} t;

enum { WORK_BYTES = 4 << 20, VALUE_DIM = HEAD_DIM };

static fixture use(kvant_role role)
{
    uint64_t rng = 7;
    fixture f = make_heads("turboquant-4", "turboquant-4", role, 1, 3, 0);
    write_range(&f, 0, 150, 150, 1, &rng);
    return f;
}

static kvant_status size_of_tensor(void *params)
{
    size_t bytes = 0;
    const kvant_status status = kvant_tensor_size(params, &bytes);
    assert_int_equal(bytes, status == KVANT_OK ? t.k.bytes : 0);
    return status;
}

static kvant_status create_tensor(void *params)
{
    kvant_tensor *tensor = NULL;
    memset(t.memory, 0, t.k.bytes);
    const kvant_status status = kvant_tensor_create(params, t.memory, &tensor);
    assert_int_equal(tensor != NULL, status == KVANT_OK);
    kvant_tensor_free(&tensor);
    return status;
}

static kvant_status most_bytes(const kvant_scheme_location *place,
                               const kvant_tensor_params *params)
{
    size_t bytes = 0;
    const kvant_status status = kvant_scheme_most_bytes(t.scheme, place, WIDTH, params, &bytes);
    assert_int_equal(bytes > 0, status == KVANT_OK);
    return status;
}

static const kvant_scheme_location a_place = {
    .size = sizeof a_place, .n_layers = 1, .n_kv_heads = N_KV_HEADS, .head_dim = HEAD_DIM
};

static kvant_status most_bytes_of_params(void *params)
{
    return most_bytes(&a_place, params);
}

static kvant_status most_bytes_of_place(void *place)
{
    return most_bytes(place, &t.params);
}

/* The same functions with a struct that the params point to, which may also be missing. */
static kvant_status with_exact(struct_call *call, void *exact)
{
    kvant_tensor_params params = t.params;
    params.exact = exact;
    return exact ? call(&params) : KVANT_ERR_ARGUMENT;
}

static kvant_status with_steps(struct_call *call, void *steps)
{
    kvant_tensor_params params = t.params;
    params.steps = steps;
    return steps ? call(&params) : KVANT_ERR_ARGUMENT;
}

#define NESTED(what, call)                                                                         \
    static kvant_status call##_##what(void *given)                                                 \
    {                                                                                              \
        return with_##what(call, given);                                                           \
    }
NESTED(exact, size_of_tensor)
NESTED(exact, create_tensor)
NESTED(exact, most_bytes_of_params)
NESTED(steps, size_of_tensor)
NESTED(steps, create_tensor)
NESTED(steps, most_bytes_of_params)

CASE(tensor_params)
{
    t.params = params_of(&t.k);
    const kvant_exact_part exact = { .size = sizeof exact };
    const kvant_step_pages steps = { .size = sizeof steps };
    const kvant_scheme_params scheme = { .size = sizeof scheme, .k = "int-4" };
    assert_int_equal(kvant_scheme_create(&scheme, &t.scheme), KVANT_OK);
    CHECK_GIVEN(kvant_tensor_size, kvant_tensor_params, size_of_tensor, &t.params, n_open_blocks);
    CHECK_GIVEN(kvant_tensor_create, kvant_tensor_params, create_tensor, &t.params, n_open_blocks);
    CHECK_GIVEN(kvant_scheme_most_bytes, kvant_tensor_params, most_bytes_of_params, &t.params,
                n_open_blocks);
    CHECK_GIVEN(kvant_scheme_most_bytes, kvant_scheme_location, most_bytes_of_place, &a_place,
                head_dim);
    CHECK_GIVEN(kvant_tensor_size, kvant_exact_part, size_of_tensor_exact, &exact, step);
    CHECK_GIVEN(kvant_tensor_create, kvant_exact_part, create_tensor_exact, &exact, step);
    CHECK_GIVEN(kvant_scheme_most_bytes, kvant_exact_part, most_bytes_of_params_exact, &exact,
                step);
    CHECK_GIVEN(kvant_tensor_size, kvant_step_pages, size_of_tensor_steps, &steps, owner);
    CHECK_GIVEN(kvant_tensor_create, kvant_step_pages, create_tensor_steps, &steps, owner);
    CHECK_GIVEN(kvant_scheme_most_bytes, kvant_step_pages, most_bytes_of_params_steps, &steps,
                owner);
    kvant_scheme_free(&t.scheme);
}

static kvant_status fill_tensor(void *info)
{
    return kvant_tensor_get_info(t.k.tensor, info);
}

static kvant_status fill_block(void *info)
{
    return kvant_tensor_get_block(t.k.tensor, 1, 1, info);
}

static kvant_status note(void *queries)
{
    return kvant_tensor_note_queries(t.k.tensor, queries, 1);
}

static kvant_status set_rope(void *rope)
{
    return rope ? kvant_tensor_set_rope(t.k.tensor, rope) : KVANT_ERR_ARGUMENT; /* NULL: none */
}

static kvant_status shift(void *rope)
{
    const int32_t by = 0;
    return kvant_tensor_shift(t.k.tensor, rope, &by, 1, 1);
}

static kvant_status find_phase(void *rope)
{
    float phase[HEAD_DIM];
    return kvant_rope_phase(rope, HEAD_DIM, 3, phase, NULL);
}

static const float frequencies[HEAD_DIM / 2] = { 1 };
static const kvant_rope a_rope = { .n_dims = HEAD_DIM, .frequencies = frequencies };

CASE(tensor_structs)
{
    const kvant_queries queries = { .q = t.q,
                                    .token_stride = WIDTH,
                                    .head_stride = HEAD_DIM,
                                    .n_tokens = 2,
                                    .n_heads = N_KV_HEADS };
    CHECK_FILLED(kvant_tensor_get_info, kvant_tensor_info, fill_tensor, written_blocks);
    CHECK_FILLED(kvant_tensor_get_block, kvant_block_info, fill_block, affine);
    CHECK_GIVEN(kvant_tensor_note_queries, kvant_queries, note, &queries, n_heads);
    CHECK_GIVEN(kvant_tensor_set_rope, kvant_rope, set_rope, &a_rope, n_position_transforms);
    CHECK_GIVEN(kvant_tensor_shift, kvant_rope, shift, &a_rope, n_position_transforms);
    CHECK_GIVEN(kvant_rope_phase, kvant_rope, find_phase, &a_rope, n_position_transforms);
}

/* Attention */

/* On an error nothing was written. */
static kvant_status untouched(kvant_status status)
{
    assert_true(status == KVANT_OK || (t.got.out[0] == 1 && t.got.lse[0] == 1));
    t.got.out[0] = t.got.lse[0] = 1;
    return status;
}

static kvant_status attend_sized(void *problem)
{
    return untouched(kvant_attention(t.k.tensor, t.v.tensor, problem, t.memory, WORK_BYTES));
}

static kvant_status attend_bytes(void *problem)
{
    size_t bytes;
    return kvant_attention_workspace(t.k.tensor, t.v.tensor, problem, &bytes);
}

static void *memory_of(void *user, size_t bytes)
{
    return bytes <= WORK_BYTES ? user : NULL;
}

static kvant_status step_sized(void *problem)
{
    kvant_attention_step step = { .workspace = memory_of, .user = t.memory };
    return untouched(kvant_attention_step_run(t.k.tensor, t.v.tensor, problem, &step));
}

static kvant_status latent_sized(void *problem)
{
    return untouched(kvant_latent_attention(t.v.tensor, VALUE_DIM, problem, t.memory, WORK_BYTES));
}

static kvant_status latent_bytes(void *problem)
{
    size_t bytes;
    return kvant_latent_attention_workspace(t.v.tensor, VALUE_DIM, problem, &bytes);
}

static kvant_status block_sized(void *problem)
{
    return untouched(kvant_block_attention(&t.rows, &t.rows, problem, t.memory, WORK_BYTES));
}

static kvant_status block_bytes(void *problem)
{
    size_t bytes;
    return kvant_block_attention_workspace(&t.rows, &t.rows, problem, &bytes);
}

/* As keys and as values: both have to be accepted, or both refused. */
static kvant_status block_rows_sized(void *rows)
{
    const kvant_status status =
        untouched(kvant_block_attention(rows, &t.rows, &t.problem, t.memory, WORK_BYTES));
    assert_int_equal(
        untouched(kvant_block_attention(&t.rows, rows, &t.problem, t.memory, WORK_BYTES)), status);
    return status;
}

static kvant_status block_rows_bytes(void *rows)
{
    size_t bytes;
    const kvant_status status = kvant_block_attention_workspace(rows, &t.rows, &t.problem, &bytes);
    assert_int_equal(kvant_block_attention_workspace(&t.rows, rows, &t.problem, &bytes), status);
    return status;
}

CASE(attention_structs)
{
    uint64_t rng = 6;
    fill_normal(t.q, COUNT(t.q), &rng);
    t.got.out[0] = t.got.lse[0] = 1;
    t.problem = (kvant_attention_problem){ .size = sizeof t.problem,
                                           .n_queries = 2,
                                           .n_tokens = 150,
                                           .n_heads = N_HEADS,
                                           .n_threads = 1,
                                           .q = t.q,
                                           .q_token_stride = (size_t)N_HEADS * HEAD_DIM,
                                           .q_head_stride = HEAD_DIM,
                                           .out = t.got.out,
                                           .out_token_stride = (size_t)N_HEADS * HEAD_DIM,
                                           .out_head_stride = HEAD_DIM,
                                           .lse = t.got.lse,
                                           .scale = 0.1f,
                                           .causal = true };
    t.rows = (kvant_block_rows){ .size = sizeof t.rows,
                                 .type = KVANT_BLOCK_F32,
                                 .head_dim = HEAD_DIM,
                                 .n_kv_heads = N_KV_HEADS,
                                 .data = t.k.rows,
                                 .bytes = 150 * WIDTH * sizeof(float),
                                 .token_stride = WIDTH * sizeof(float),
                                 .head_stride = HEAD_DIM * sizeof(float) };
    CHECK_GIVEN(kvant_attention, kvant_attention_problem, attend_sized, &t.problem, exact);
    CHECK_GIVEN(kvant_attention_step_run, kvant_attention_problem, step_sized, &t.problem, exact);
    CHECK_GIVEN(kvant_attention_workspace, kvant_attention_problem, attend_bytes, &t.problem,
                exact);
    CHECK_GIVEN(kvant_block_attention, kvant_attention_problem, block_sized, &t.problem, exact);
    CHECK_GIVEN(kvant_block_attention_workspace, kvant_attention_problem, block_bytes, &t.problem,
                exact);
    CHECK_GIVEN(kvant_block_attention, kvant_block_rows, block_rows_sized, &t.rows, head_stride);
    CHECK_GIVEN(kvant_block_attention_workspace, kvant_block_rows, block_rows_bytes, &t.rows,
                head_stride);
    kvant_attention_problem latent = t.problem; /* heads of whole rows */
    latent.n_heads = N_HEADS / N_KV_HEADS;
    latent.q_head_stride = WIDTH;
    CHECK_GIVEN(kvant_latent_attention, kvant_attention_problem, latent_sized, &latent, exact);
    CHECK_GIVEN(kvant_latent_attention_workspace, kvant_attention_problem, latent_bytes, &latent,
                exact);
}

/* Indexes */

static kvant_index *an_index;

static kvant_status take_index(void *params)
{
    kvant_index *index;
    const kvant_status status = kvant_index_create(params, &index, NULL, 0);
    assert_int_equal(index != NULL, status == KVANT_OK);
    kvant_index_free(&index);
    return status;
}

static kvant_status search(void *query)
{
    float score;
    uint64_t id;
    return kvant_index_search(an_index, query, &score, &id);
}

static kvant_status fill_index(void *info)
{
    return kvant_index_get_info(an_index, info);
}

CASE(index_structs)
{
    const kvant_index_params params = { .size = sizeof params, .dim = 4, .spec = "turboquant-4" };
    const float row[4] = { 1 };
    const kvant_index_query query = {
        .size = sizeof query, .rows = row, .stride = 4, .n = 1, .k = 1
    };
    assert_int_equal(kvant_index_create(&params, &an_index, NULL, 0), KVANT_OK);
    CHECK_GIVEN(kvant_index_create, kvant_index_params, take_index, &params, center);
    CHECK_GIVEN(kvant_index_search, kvant_index_query, search, &query, n_probe);
    CHECK_FILLED(kvant_index_get_info, kvant_index_info, fill_index, n_lists);
    kvant_index_free(&an_index);
}

/* Calibrations, settings, schemes, caches, codecs */

/* The objects that these calls work on. */
static struct {
    kvant_calibrator *calibrator;
    kvant_calibration *calibration;
    kvant_settings *settings;
    kvant_scheme *scheme;
    kvant_cache *cache;
    kvant_codec *codec;
} made;

static kvant_status take_calibrator(void *given)
{
    kvant_calibrator *calibrator = NULL;
    const kvant_status status = kvant_calibrator_create(given, &calibrator, NULL, 0);
    assert_int_equal(calibrator != NULL, status == KVANT_OK);
    kvant_calibrator_free(&calibrator);
    return status;
}

static kvant_status take_attention(void *given)
{
    return kvant_calibrator_add_attention(made.calibrator, 0, 0, HEAD_DIM, 0, given);
}

static kvant_status take_sums(void *given)
{
    return kvant_calibrator_add_moments(made.calibrator, 0, KVANT_ROLE_V, given);
}

static kvant_status fill_calibration(void *info)
{
    return kvant_calibration_get_info(made.calibration, info);
}

static kvant_status fill_entry(void *entry)
{
    return kvant_calibration_get_entry(made.calibration, 0, 0, KVANT_ROLE_K, entry);
}

CASE(calibration_structs)
{
    static float rows[64 * HEAD_DIM];
    static const double sums[HEAD_DIM];
    uint64_t rng = 5;
    fill_normal(rows, COUNT(rows), &rng);
    const kvant_calibrator_config config = { .size = sizeof config, .seed = 3, .n_threads = 1 };
    const kvant_calibrator_attention observed = { .keys = rows,
                                                  .key_stride = HEAD_DIM,
                                                  .n_keys = 9,
                                                  .queries = rows,
                                                  .query_stride = HEAD_DIM,
                                                  .n_queries = 2,
                                                  .scale = 0.1f };
    const kvant_calibrator_moments added = {
        .n_kv_heads = 1, .head_dim = HEAD_DIM, .n_rows = 1, .sum = sums, .min = rows, .max = rows
    };
    assert_int_equal(kvant_calibrator_create(&config, &made.calibrator, NULL, 0), KVANT_OK);
    for (int role = 0; role < 2; role++)
        assert_ok(kvant_calibrator_add_rows(made.calibrator, 0, (kvant_role)role, 1, HEAD_DIM, rows,
                                            HEAD_DIM, 64));
    CHECK_GIVEN(kvant_calibrator_create, kvant_calibrator_config, take_calibrator, &config,
                n_threads);
    CHECK_GIVEN(kvant_calibrator_add_attention, kvant_calibrator_attention, take_attention,
                &observed, scale);
    CHECK_GIVEN(kvant_calibrator_add_moments, kvant_calibrator_moments, take_sums, &added,
                attended_weight);
    assert_ok(kvant_calibrator_add_queries(made.calibrator, 0, 0, HEAD_DIM, rows, HEAD_DIM, 64));
    assert_int_equal(kvant_calibrator_finish(made.calibrator, &made.calibration), KVANT_OK);
    CHECK_FILLED(kvant_calibration_get_info, kvant_calibration_info, fill_calibration, checksum);
    CHECK_FILLED(kvant_calibration_get_entry, kvant_calibration_entry, fill_entry, centroids);
    kvant_calibrator_free(&made.calibrator);
    kvant_calibration_free(&made.calibration);
}

static kvant_status take_settings(void *given)
{
    kvant_settings *settings = NULL;
    const kvant_status status = kvant_settings_create(given, &settings, NULL, 0);
    assert_int_equal(settings != NULL, status == KVANT_OK);
    kvant_settings_free(&settings);
    return status;
}

static kvant_status fill_settings(void *info)
{
    return kvant_settings_get_info(made.settings, info);
}

static kvant_status fill_preset(void *preset)
{
    return kvant_preset_get("tiny", 0, preset);
}

static kvant_status take_preset(void *preset)
{
    return kvant_preset_spec(preset, KVANT_ROLE_K, 0, 128) ? KVANT_OK : KVANT_ERR_ARGUMENT;
}

CASE(settings_structs)
{
    const kvant_settings_layer layers[] = {
        { .spec = "int-4", .n_kv_heads = 1, .head_dim = HEAD_DIM },
        { .spec = "int-8", .n_kv_heads = 1, .head_dim = HEAD_DIM }
    };
    const kvant_settings_config config = {
        .size = sizeof config, .model = "m", .n_layers = 1, .layers = layers
    };
    assert_int_equal(kvant_settings_create(&config, &made.settings, NULL, 0), KVANT_OK);
    CHECK_GIVEN(kvant_settings_create, kvant_settings_config, take_settings, &config,
                calibration_checksum);
    CHECK_FILLED(kvant_settings_get_info, kvant_settings_info, fill_settings, calibration_checksum);
    CHECK_FILLED(kvant_preset_get, kvant_preset, fill_preset, more_k);
    kvant_preset preset = { .size = sizeof preset };
    assert_int_equal(kvant_preset_get("tiny", 0, &preset), KVANT_OK);
    CHECK_GIVEN(kvant_preset_spec, kvant_preset, take_preset, &preset, more_k);
    kvant_settings_free(&made.settings);
}

static kvant_status take_scheme(void *given)
{
    kvant_scheme *scheme = NULL;
    const kvant_status status = kvant_scheme_create(given, &scheme);
    kvant_scheme_free(&scheme);
    return status;
}

static kvant_status take_place(void *given)
{
    const kvant_codec *const *codecs;
    return kvant_scheme_codecs(made.scheme, given, &codecs);
}

static kvant_status take_model(void *given)
{
    double bits = -1;
    const kvant_status status = kvant_scheme_true_bits(made.scheme, given, &bits);
    assert_true(status == KVANT_OK ? bits > 0 : bits == -1); /* on an error nothing is changed */
    return status;
}

static kvant_status fill_scheme(void *info)
{
    return kvant_scheme_get_info(made.scheme, info);
}

static kvant_status fill_exact(void *part)
{
    return kvant_scheme_exact(made.scheme, 1 << 20, 3, part);
}

static kvant_status take_cache(void *given)
{
    kvant_cache *cache = NULL;
    const kvant_status status = kvant_cache_create(given, &cache);
    kvant_cache_free(&cache);
    return status;
}

static kvant_status take_queries(void *given)
{
    return kvant_cache_note_queries(made.cache, 0, given);
}

static kvant_status take_rope(void *given)
{
    return given ? kvant_cache_set_rope(made.cache, 0, given)
                 : KVANT_ERR_ARGUMENT; /* NULL: no rope */
}

static kvant_status attend_cache(void *problem)
{
    return kvant_cache_attention(made.cache, 0, 0, problem);
}

static kvant_status fill_cache(void *info)
{
    return kvant_cache_get_info(made.cache, info);
}

static kvant_status fill_codec(void *info)
{
    return kvant_codec_get_info(made.codec, info);
}

static kvant_status fill_family(void *family)
{
    return kvant_codec_family_get(0, family);
}

CASE(scheme_and_cache_structs)
{
    static float q[2 * HEAD_DIM], out[HEAD_DIM];
    const kvant_scheme_params scheme = { .size = sizeof scheme,
                                         .k = "int-4:transform=first",
                                         .v = "int-4" };
    const kvant_scheme_location place = {
        .layer = 1, .n_layers = 2, .n_kv_heads = 1, .head_dim = HEAD_DIM
    };
    const kvant_scheme_model model = { .n_layers = 2,
                                       .n_kv_heads = 1,
                                       .head_dim = { HEAD_DIM, HEAD_DIM } };
    const kvant_queries queries = {
        .q = q, .token_stride = HEAD_DIM, .head_stride = HEAD_DIM, .n_tokens = 2, .n_heads = 1
    };
    kvant_cache_params cache = KVANT_CACHE_PARAMS;
    cache.n_layers = cache.n_heads = cache.n_kv_heads = cache.n_threads = 1;
    cache.head_dim = HEAD_DIM, cache.max_tokens = 64;
    assert_int_equal(kvant_scheme_create(&scheme, &made.scheme), KVANT_OK);
    CHECK_GIVEN(kvant_scheme_create, kvant_scheme_params, take_scheme, &scheme, seed);
    CHECK_GIVEN(kvant_scheme_codecs, kvant_scheme_location, take_place, &place, head_dim);
    CHECK_GIVEN(kvant_scheme_true_bits, kvant_scheme_model, take_model, &model, head_dim);
    CHECK_FILLED(kvant_scheme_exact, kvant_exact_part, fill_exact, step);
    CHECK_FILLED(kvant_scheme_get_info, kvant_scheme_info, fill_scheme, needs_calibration);
    CHECK_GIVEN(kvant_cache_create, kvant_cache_params, take_cache, &cache, logit_softcap);
    cache.scheme = made.scheme;
    assert_int_equal(kvant_cache_create(&cache, &made.cache), KVANT_OK);
    CHECK_GIVEN(kvant_cache_note_queries, kvant_queries, take_queries, &queries, n_heads);
    CHECK_GIVEN(kvant_cache_set_rope, kvant_rope, take_rope, &a_rope, n_position_transforms);
    kvant_attention_problem problem = { .n_queries = 1,
                                        .q = q,
                                        .q_head_stride = HEAD_DIM,
                                        .out = out,
                                        .out_head_stride = HEAD_DIM,
                                        .causal = true };
    assert_int_equal(kvant_sequence_create(made.cache), 0);
    assert_int_equal(kvant_cache_append(made.cache, 0, 0, q, q, 1), KVANT_OK);
    CHECK_GIVEN(kvant_cache_attention, kvant_attention_problem, attend_cache, &problem, exact);
    CHECK_FILLED(kvant_cache_get_info, kvant_cache_info, fill_cache, v);
    kvant_cache_free(&made.cache);
    kvant_scheme_free(&made.scheme);
    made.codec = make_codec("turboquant-4", HEAD_DIM, KVANT_ROLE_K);
    CHECK_FILLED(kvant_codec_get_info, kvant_codec_info, fill_codec, nominal_bits);
    CHECK_FILLED(kvant_codec_family_get, kvant_codec_family, fill_family, summary);
    kvant_codec_free(&made.codec);
}

int main(void)
{
    t.k = use(KVANT_ROLE_K);
    t.v = use(KVANT_ROLE_V);
    t.memory = aligned(WORK_BYTES);
    const int failed = run_cases(NULL, NULL);
    drop(&t.k);
    drop(&t.v);
    free(t.memory);
    return failed;
}
