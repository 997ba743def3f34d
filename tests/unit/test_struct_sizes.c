/* test_struct_sizes.c - size fields of structs that cross the library's border: a caller
 * compiled against the first released header or against a newer one is served, one that asks for
 * what this version does not know is refused. */
#include <kvant/cache.h>
#include <kvant/calibration.h>
#include <kvant/index.h>
#include <kvant/settings.h>

#include "attend.h"

#define TAIL 24 /* bytes of a newer header's members */

/* An object of exactly these bytes, so that a sanitiser sees one read or written too many; the
 * size field says how many. */
static void *sized(const void *object, size_t known, size_t size, uint8_t tail)
{
    uint8_t *bytes = malloc(size);
    memset(bytes, 0, size);
    memcpy(bytes, object, size < known ? size : known);
    if (size > known)
        bytes[known + (size - known) / 2] = tail;
    memcpy(bytes, &size, sizeof size);
    return bytes;
}

#define END_OF(type, member) (offsetof(type, member) + sizeof(((type *)0)->member))

static fixture use(kvant_role role)
{
    uint64_t rng = 7;
    fixture f = make_heads("turboquant-4", "turboquant-4", role, 1, 3, 0);
    write_range(&f, 0, 150, 150, 1, &rng);
    return f;
}

static kvant_status try_params(const fixture *f, size_t size, uint8_t tail)
{
    kvant_tensor_params params = params_of(f);
    kvant_tensor_params *given = sized(&params, sizeof params, size, tail);
    kvant_tensor *tensor = NULL;
    size_t bytes = 0;
    kvant_status status = kvant_tensor_size(given, &bytes);
    void *memory = aligned(f->bytes);
    assert_int_equal(kvant_tensor_create(given, memory, &tensor), status);
    assert_int_equal(tensor != NULL, status == KVANT_OK);
    if (status == KVANT_OK)
        assert_int_equal(bytes, f->bytes);
    kvant_tensor_free(&tensor);
    free(memory);
    free(given);
    return status;
}

static void tensor_params(void **state)
{
    (void)state;
    fixture f = use(KVANT_ROLE_K);
    const size_t first = END_OF(kvant_tensor_params, n_open_blocks),
                 now = sizeof(kvant_tensor_params);
    assert_int_equal(try_params(&f, first, 0), KVANT_OK);
    assert_int_equal(try_params(&f, now, 0), KVANT_OK);
    assert_int_equal(try_params(&f, now + TAIL, 0), KVANT_OK);
    assert_int_equal(try_params(&f, now + TAIL, 1), KVANT_ERR_ARGUMENT);
    for (size_t size = sizeof(size_t); size < first; size++)
        assert_int_equal(try_params(&f, size, 0), KVANT_ERR_ARGUMENT);
    drop(&f);
}

typedef struct attention {
    fixture k, v;
    float q[2 * N_HEADS * HEAD_DIM];
    attended want, got;
} attention;

static kvant_status try_problem(attention *a, size_t size, uint8_t tail)
{
    kvant_attention_problem problem = {
        .n_queries = 2, .n_tokens = 150, .causal = true, .scale = 0.1f
    };
    size_t bytes = 0, other = 0;
    assert_int_equal(attend(&a->k, &a->v, &problem, a->q, &a->want), KVANT_OK);
    problem.out = a->got.out;
    problem.lse = a->got.lse;
    a->got = (attended){ .out = { 1 } };
    assert_int_equal(kvant_attention_workspace(a->k.tensor, a->v.tensor, &problem, &bytes),
                     KVANT_OK);
    void *workspace = aligned(bytes);
    kvant_attention_problem *given = sized(&problem, sizeof problem, size, tail);
    kvant_status status = kvant_attention(a->k.tensor, a->v.tensor, given, workspace, bytes);
    assert_int_equal(kvant_attention_workspace(a->k.tensor, a->v.tensor, given, &other), status);
    if (status == KVANT_OK) {
        assert_int_equal(bytes, other);
        assert_memory_equal(a->got.out, a->want.out, sizeof a->q);
        assert_memory_equal(a->got.lse, a->want.lse, 2 * N_HEADS * sizeof *a->got.lse);
    } else
        assert_true(a->got.out[0] == 1 && a->got.out[1] == 0); /* nothing was written */
    free(given);
    free(workspace);
    return status;
}

static void attention_problem(void **state)
{
    (void)state;
    static attention a;
    uint64_t rng = 6;
    a.k = use(KVANT_ROLE_K);
    a.v = use(KVANT_ROLE_V);
    fill_normal(a.q, COUNT(a.q), &rng);
    const size_t first = END_OF(kvant_attention_problem, exact),
                 now = sizeof(kvant_attention_problem);
    assert_int_equal(try_problem(&a, first, 0), KVANT_OK);
    assert_int_equal(try_problem(&a, now, 0), KVANT_OK);
    assert_int_equal(try_problem(&a, now + TAIL, 0), KVANT_OK);
    assert_int_equal(try_problem(&a, now + TAIL, 1), KVANT_ERR_ARGUMENT);
    for (size_t size = sizeof(size_t); size < first; size++)
        assert_int_equal(try_problem(&a, size, 0), KVANT_ERR_ARGUMENT);
    drop(&a.k);
    drop(&a.v);
}

/* Structs that the library fills: cut to the caller's size. Members that the library does not know
 * become zero. */
static void filled_structs(void **state)
{
    (void)state;
    fixture f = use(KVANT_ROLE_K);
    kvant_tensor_info info = tensor_info_of(&f);
    kvant_block_info block = block_of(&f, 1, 1);
    for (int newer = 0; newer < 2; newer++) {
        size_t size = newer ? sizeof info + TAIL : END_OF(kvant_tensor_info, written_blocks);
        kvant_tensor_info *given = sized(&(kvant_tensor_info){ 0 }, sizeof info, size, 0xaa);
        assert_int_equal(kvant_tensor_get_info(f.tensor, given), KVANT_OK);
        assert_memory_equal((char *)given + sizeof(size_t), (char *)&info + sizeof(size_t),
                            (newer ? sizeof info : size) - sizeof(size_t));
        assert_int_equal(given->size, size);
        assert_true(!newer || ((uint8_t *)given)[sizeof info + TAIL / 2] == 0);
        free(given);
        size = newer ? sizeof block + TAIL : END_OF(kvant_block_info, affine);
        kvant_block_info *page = sized(&(kvant_block_info){ 0 }, sizeof block, size, 0xaa);
        assert_int_equal(kvant_tensor_get_block(f.tensor, 1, 1, page), KVANT_OK);
        assert_int_equal(page->state, block.state);
        assert_ptr_equal(page->page, block.page);
        assert_true(page->written == block.written);
        assert_int_equal(page->size, size);
        assert_true(!newer || ((uint8_t *)page)[sizeof block + TAIL / 2] == 0);
        free(page);
    }
    for (size_t size = sizeof(size_t); size < END_OF(kvant_tensor_info, written_blocks); size++) {
        kvant_tensor_info *given = sized(&(kvant_tensor_info){ 0 }, sizeof info, size, 0);
        assert_int_equal(kvant_tensor_get_info(f.tensor, given), KVANT_ERR_ARGUMENT);
        free(given);
    }
    for (size_t size = sizeof(size_t); size < END_OF(kvant_block_info, affine); size++) {
        kvant_block_info *given = sized(&(kvant_block_info){ 0 }, sizeof block, size, 0);
        assert_int_equal(kvant_tensor_get_block(f.tensor, 0, 0, given), KVANT_ERR_ARGUMENT);
        free(given);
    }
    assert_int_equal(kvant_tensor_get_info(f.tensor, NULL), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_get_block(f.tensor, 0, 0, NULL), KVANT_ERR_ARGUMENT);
    drop(&f);
}

static kvant_status try_index(size_t size, uint8_t tail)
{
    const kvant_index_params params = { .size = sizeof params, .dim = 4, .spec = "turboquant-4" };
    kvant_index_params *given = sized(&params, sizeof params, size, tail);
    kvant_index *index;
    const kvant_status status = kvant_index_create(given, &index, NULL, 0);
    assert_int_equal(index != NULL, status == KVANT_OK);
    kvant_index_free(&index);
    free(given);
    return status;
}

static void index_structs(void **state)
{
    const kvant_index_params params = { .size = sizeof params, .dim = 4 };
    const float row[4] = { 1 };
    const kvant_index_query query = {
        .size = sizeof query, .rows = row, .stride = 4, .n = 1, .k = 1
    };
    const size_t first = END_OF(kvant_index_params, center), now = sizeof params;
    kvant_index *index;
    float score;
    uint64_t id;
    (void)state;
    assert_int_equal(try_index(now, 0), KVANT_OK);
    assert_int_equal(try_index(now + TAIL, 0), KVANT_OK);
    assert_int_equal(try_index(now + TAIL, 1), KVANT_ERR_ARGUMENT);
    for (size_t size = sizeof(size_t); size < first; size++)
        assert_int_equal(try_index(size, 0), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_index_create(&params, &index, NULL, 0), KVANT_OK);
    for (size_t size = sizeof(size_t); size <= sizeof query; size++) {
        kvant_index_query *given = sized(&query, sizeof query, size, 0);
        const bool served = size >= END_OF(kvant_index_query, n_probe);
        assert_int_equal(kvant_index_search(index, given, &score, &id),
                         served ? KVANT_OK : KVANT_ERR_ARGUMENT);
        free(given);
    }
    for (size_t size = sizeof(size_t); size <= sizeof(kvant_index_info); size++) {
        kvant_index_info *given =
            sized(&(kvant_index_info){ 0 }, sizeof(kvant_index_info), size, 0);
        const bool served = size >= END_OF(kvant_index_info, n_lists);
        assert_int_equal(kvant_index_get_info(index, given),
                         served ? KVANT_OK : KVANT_ERR_ARGUMENT);
        free(given);
    }
    kvant_index_free(&index);
}

/* All other structs: a call that takes or fills one of them, of any size. */
typedef kvant_status struct_call(void *given);

static void check_given(struct_call *take, const void *object, size_t first, size_t now)
{
    for (size_t size = sizeof(size_t); size <= now + TAIL; size++) {
        void *given = sized(object, now, size, 0);
        const kvant_status status = take(given);
        if (status != (size < first ? KVANT_ERR_ARGUMENT : KVANT_OK))
            fail_msg("%zu bytes: status %d", size, (int)status);
        free(given);
    }
    void *unknown = sized(object, now, now + TAIL, 1);
    assert_int_equal(take(unknown), KVANT_ERR_ARGUMENT);
    free(unknown);
    assert_int_equal(take(NULL), KVANT_ERR_ARGUMENT);
}

/* The bytes of a struct that was filled at this size, over bytes that were 0xaa. */
static uint8_t *filled(struct_call *fill, size_t size, kvant_status wanted)
{
    uint8_t *bytes = malloc(size);
    memset(bytes, 0xaa, size);
    memcpy(bytes, &size, sizeof size);
    const kvant_status status = fill(bytes);
    if (status != wanted)
        fail_msg("%zu bytes: status %d", size, (int)status);
    assert_memory_equal(bytes, &size, sizeof size);
    return bytes;
}

static void check_filled(struct_call *fill, size_t first, size_t now)
{
    uint8_t *want = filled(fill, now, KVANT_OK);
    for (size_t size = sizeof(size_t); size <= now + TAIL; size++) {
        uint8_t *got = filled(fill, size, size < first ? KVANT_ERR_ARGUMENT : KVANT_OK);
        for (size_t i = sizeof size; i < size; i++)
            if (got[i] != (size < first ? 0xaa : i < now ? want[i] : 0))
                fail_msg("byte %zu of %zu is %02x", i, size, got[i]);
        free(got);
    }
    free(want);
    assert_int_equal(fill(NULL), KVANT_ERR_ARGUMENT);
}

#define CHECK_GIVEN(take, type, object, last)                                                      \
    check_given(take, object, END_OF(type, last), sizeof(type))
#define CHECK_FILLED(fill, type, last) check_filled(fill, END_OF(type, last), sizeof(type))

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
    return kvant_calibrator_add_sums(made.calibrator, 0, KVANT_ROLE_V, given);
}

static kvant_status fill_calibration(void *info)
{
    return kvant_calibration_get_info(made.calibration, info);
}

static kvant_status fill_entry(void *entry)
{
    return kvant_calibration_get_entry(made.calibration, 0, 0, KVANT_ROLE_K, entry);
}

static void calibration_structs(void **state)
{
    (void)state;
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
    const kvant_calibrator_sums added = {
        .n_kv_heads = 1, .head_dim = HEAD_DIM, .n_rows = 1, .sum = sums, .min = rows, .max = rows
    };
    assert_int_equal(kvant_calibrator_create(&config, &made.calibrator, NULL, 0), KVANT_OK);
    for (int role = 0; role < 2; role++)
        assert_int_equal(kvant_calibrator_add_rows(made.calibrator, 0, (kvant_role)role, 1,
                                                   HEAD_DIM, rows, HEAD_DIM, 64),
                         KVANT_OK);
    CHECK_GIVEN(take_calibrator, kvant_calibrator_config, &config, n_threads);
    CHECK_GIVEN(take_attention, kvant_calibrator_attention, &observed, scale);
    CHECK_GIVEN(take_sums, kvant_calibrator_sums, &added, attended_weight);
    assert_int_equal(
        kvant_calibrator_add_queries(made.calibrator, 0, 0, HEAD_DIM, rows, HEAD_DIM, 64),
        KVANT_OK);
    assert_int_equal(kvant_calibrator_finish(made.calibrator, &made.calibration), KVANT_OK);
    CHECK_FILLED(fill_calibration, kvant_calibration_info, checksum);
    CHECK_FILLED(fill_entry, kvant_calibration_entry, centroids);
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

static void settings_structs(void **state)
{
    (void)state;
    const kvant_settings_layer layers[] = {
        { .spec = "int-4", .n_kv_heads = 1, .head_dim = HEAD_DIM },
        { .spec = "int-8", .n_kv_heads = 1, .head_dim = HEAD_DIM }
    };
    const kvant_settings_config config = {
        .size = sizeof config, .model = "m", .n_layers = 1, .layers = layers
    };
    assert_int_equal(kvant_settings_create(&config, &made.settings, NULL, 0), KVANT_OK);
    CHECK_GIVEN(take_settings, kvant_settings_config, &config, calibration_checksum);
    CHECK_FILLED(fill_settings, kvant_settings_info, calibration_checksum);
    CHECK_FILLED(fill_preset, kvant_preset, more_k);
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

static void scheme_and_cache_structs(void **state)
{
    (void)state;
    static const float frequencies[HEAD_DIM / 2] = { 1 };
    static float q[2 * HEAD_DIM];
    const kvant_scheme_params scheme = { .size = sizeof scheme,
                                         .k = "int-4:transform=first",
                                         .v = "int-4" };
    const kvant_scheme_place place = {
        .layer = 1, .n_layers = 2, .n_kv_heads = 1, .head_dim = HEAD_DIM
    };
    const kvant_scheme_model model = { .n_layers = 2,
                                       .n_kv_heads = 1,
                                       .head_dim = { HEAD_DIM, HEAD_DIM } };
    const kvant_rope rope = { .n_dims = HEAD_DIM, .frequencies = frequencies };
    const kvant_queries queries = {
        .q = q, .token_stride = HEAD_DIM, .head_stride = HEAD_DIM, .n_tokens = 2, .n_heads = 1
    };
    kvant_cache_params cache = KVANT_CACHE_PARAMS;
    cache.n_layers = cache.n_heads = cache.n_kv_heads = cache.n_threads = 1;
    cache.head_dim = HEAD_DIM, cache.max_tokens = 64;
    assert_int_equal(kvant_scheme_create(&scheme, &made.scheme), KVANT_OK);
    CHECK_GIVEN(take_scheme, kvant_scheme_params, &scheme, seed);
    CHECK_GIVEN(take_place, kvant_scheme_place, &place, head_dim);
    CHECK_GIVEN(take_model, kvant_scheme_model, &model, head_dim);
    CHECK_FILLED(fill_exact, kvant_exact_part, step);
    CHECK_FILLED(fill_scheme, kvant_scheme_info, needs_calibration);
    CHECK_GIVEN(take_cache, kvant_cache_params, &cache, logit_softcap);
    cache.scheme = made.scheme;
    assert_int_equal(kvant_cache_create(&cache, &made.cache), KVANT_OK);
    CHECK_GIVEN(take_queries, kvant_queries, &queries, n_heads);
    CHECK_GIVEN(take_rope, kvant_rope, &rope, n_ranges);
    CHECK_FILLED(fill_cache, kvant_cache_info, v);
    kvant_cache_free(&made.cache);
    kvant_scheme_free(&made.scheme);
    made.codec = make_codec("turboquant-4", HEAD_DIM, KVANT_ROLE_K);
    CHECK_FILLED(fill_codec, kvant_codec_info, nominal_bits);
    CHECK_FILLED(fill_family, kvant_codec_family, summary);
    kvant_codec_free(&made.codec);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensor_params),
        cmocka_unit_test(attention_problem),
        cmocka_unit_test(filled_structs),
        cmocka_unit_test(index_structs),
        cmocka_unit_test(calibration_structs),
        cmocka_unit_test(settings_structs),
        cmocka_unit_test(scheme_and_cache_structs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
