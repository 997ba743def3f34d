/* test_cuda_struct_sizes.c - test_struct_sizes for the functions that need a GPU: a mock of
 * libkvant_cuda.so (tests/cuda/host) answers. */
#include "sized.h"

#include <dlfcn.h>

#include <kvant/cache.h>
#include <kvant/index.h>

#include "../cuda/host/host.h"

enum { DIM = 64 };

static host_control *host;
static kvant_cache *cache;
static kvant_codec *codec;
static kvant_cuda_codec *gpu_codec;
static kvant_index_gpu *gpu_index;

/* The mock answers KVANT_ERR_FULL, which no check of arguments gives: they were accepted. */
static kvant_status reached(kvant_status status)
{
    return status == KVANT_ERR_FULL ? KVANT_OK : status;
}

#define TABLE(X)                                                                                   \
    X(append, kvant_cuda_append_args, refused)                                                     \
    X(seal, kvant_cuda_seal_args, refused)                                                         \
    X(attention, kvant_cuda_attention_args, workspace_bytes)                                       \
    X(transform_queries, kvant_cuda_query_args, out)                                               \
    X(decode, kvant_cuda_decode_args, inverse_key_transform)                                       \
    X(kernel_append, kvant_cuda_kernel_append_args, centered)                                      \
    X(kernel_attention, kvant_cuda_kernel_attention_args, plain_queries)                           \
    X(kernel_transform_queries, kvant_cuda_kernel_query_args, further)                             \
    X(compact, kvant_cuda_compact_args, compact)                                                   \
    X(expand, kvant_cuda_expand_args, inverse_key_transform)                                       \
    X(place_centers, kvant_cuda_place_centers_args, layers)                                        \
    X(learn, kvant_cuda_learn_args, workspace_bytes)                                               \
    X(fill_marked, kvant_cuda_marked_args, out_head_stride)                                        \
    X(block_attention, kvant_cuda_block_args, workspace_bytes)                                     \
    X(center_rows, kvant_cuda_center_rows_args, out)                                               \
    X(page_offsets, kvant_cuda_page_offsets_args, offsets)                                         \
    X(exact_step, kvant_cuda_exact_args, n_sealed)                                                 \
    X(seal_rows, kvant_cuda_seal_rows_args, refused)

#define CALL(name, type, last)                                                                     \
    static kvant_status call_##name(void *args)                                                    \
    {                                                                                              \
        return reached(kvant_cuda_##name(args, NULL));                                             \
    }
TABLE(CALL)

CASE(calls_of_the_table)
{
    host->answer = KVANT_ERR_FULL;
#define CHECK(name, type, last)                                                                    \
    CHECK_GIVEN(kvant_cuda_##name, type, call_##name, &(type){ .size = sizeof(type) }, last);
    TABLE(CHECK)
    host->answer = KVANT_OK;
}

static const float frequencies[DIM / 2] = { 1 };
static const kvant_rope a_rope = { .n_dims = DIM, .frequencies = frequencies };

static kvant_status plan_learning(void *args)
{
    uint32_t knows_rope;
    return kvant_cuda_learn_plan(NULL, args, &knows_rope);
}

static kvant_status plan_rope(void *rope)
{
    kvant_cuda_learn_args args = { .size = sizeof args, .head_dim = DIM };
    uint32_t knows_rope;
    const kvant_status status = kvant_cuda_learn_plan(rope, &args, &knows_rope);
    return rope ? status : KVANT_ERR_ARGUMENT; /* it may be NULL */
}

static kvant_status add_span(void *args)
{
    return kvant_cuda_learn_span_add(args, 0, 100);
}

static kvant_status find_learn_bytes(void *args)
{
    return kvant_cuda_learn_bytes(args) ? KVANT_OK : KVANT_ERR_ARGUMENT;
}

CASE(plans_of_learning)
{
    const kvant_cuda_learn_args args = { .head_dim = DIM, .part = DIM, .n_kv_heads = 1 };
    CHECK_GIVEN(kvant_cuda_learn_plan, kvant_cuda_learn_args, plan_learning, &args,
                workspace_bytes);
    CHECK_GIVEN(kvant_cuda_learn_plan, kvant_rope, plan_rope, &a_rope, n_position_transforms);
    CHECK_GIVEN(kvant_cuda_learn_span_add, kvant_cuda_learn_args, add_span, &args, workspace_bytes);
    CHECK_GIVEN(kvant_cuda_learn_bytes, kvant_cuda_learn_args, find_learn_bytes, &args,
                workspace_bytes);
}

static kvant_status find_block_workspace(void *args)
{
    return kvant_cuda_block_workspace(args) ? KVANT_OK : KVANT_ERR_ARGUMENT;
}

static kvant_status fill_info(void *info)
{
    return kvant_cuda_codec_get_info(gpu_codec, info);
}

static kvant_status fill_tables(void *tables)
{
    return kvant_cuda_codec_tables(codec, tables);
}

CASE(codecs_and_block_rows)
{
    const kvant_cuda_block_args args = { .size = sizeof args,
                                         .k.type = 8, /* q8_0 */
                                         .v.type = 8,
                                         .head_dim = DIM,
                                         .n_tokens = 64,
                                         .batch = 1,
                                         .query_tokens = 1,
                                         .n_heads = 1,
                                         .n_kv_heads = 1 };
    codec = make_codec("turboquant-4", DIM, KVANT_ROLE_K);
    assert_int_equal(kvant_cuda_codec_from(codec, &gpu_codec, NULL, 0), KVANT_OK);
    CHECK_GIVEN(kvant_cuda_block_workspace, kvant_cuda_block_args, find_block_workspace, &args,
                workspace_bytes);
    CHECK_FILLED(kvant_cuda_codec_get_info, kvant_codec_info, fill_info, nominal_bits);
    CHECK_FILLED(kvant_cuda_codec_tables, kvant_cuda_tables, fill_tables, key_transform_size);
    kvant_cuda_codec_free(&gpu_codec);
    kvant_codec_free(&codec);
}

static kvant_status begin_steps(void *info)
{
    const int32_t sequence = 0;
    return kvant_steps_begin(cache, &sequence, 1, info);
}

static kvant_status step(void *args)
{
    kvant_steps_info info = { .size = sizeof info };
    assert_int_equal(begin_steps(&info), KVANT_OK);
    assert_int_equal(kvant_steps_next(cache), KVANT_OK);
    return kvant_cache_step(cache, 0, args);
}

CASE(steps_of_a_cache)
{
    static float rows[DIM], out[DIM];
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    params.n_layers = params.n_heads = params.n_kv_heads = 1;
    params.head_dim = DIM, params.max_tokens = 64, params.device = "cuda";
    params.k = params.v = "int-8";
    assert_int_equal(kvant_cache_create(&params, &cache), KVANT_OK);
    assert_int_equal(kvant_sequence_create(cache), 0);
    assert_int_equal(kvant_cache_append(cache, 0, 0, rows, rows, 1), KVANT_OK);
    const kvant_step a_step = {
        .size = sizeof a_step, .q = rows, .k = rows, .v = rows, .out = out, .type = KVANT_CUDA_F32
    };
    kvant_steps_info none = { .size = sizeof none.size };
    assert_int_equal(begin_steps(&none), KVANT_ERR_ARGUMENT);
    assert_int_not_equal(kvant_steps_next(cache), KVANT_OK); /* nothing has begun */
    CHECK_FILLED(kvant_steps_begin, kvant_steps_info, begin_steps, floats);
    CHECK_GIVEN(kvant_cache_step, kvant_step, step, &a_step, sinks);
    kvant_cache_free(&cache);
}

static kvant_status search(void *query)
{
    float score;
    uint64_t id;
    return kvant_index_gpu_search(gpu_index, query, &score, &id);
}

CASE(searches)
{
    const kvant_index_params params = { .size = sizeof params, .dim = DIM };
    static const float row[DIM] = { 1 };
    const kvant_index_query query = {
        .size = sizeof query, .rows = row, .stride = DIM, .n = 1, .k = 1
    };
    kvant_index *index;
    assert_int_equal(kvant_index_create(&params, &index, NULL, 0), KVANT_OK);
    assert_int_equal(kvant_index_add(index, row, DIM, 1, NULL, 1), KVANT_OK);
    assert_int_equal(kvant_index_gpu_create(index, &gpu_index, NULL, 0), KVANT_OK);
    CHECK_GIVEN(kvant_index_gpu_search, kvant_index_query, search, &query, n_probe);
    kvant_index_gpu_free(&gpu_index);
    kvant_index_free(&index);
}

int main(int argc, char **argv)
{
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    void *symbol = library ? dlsym(library, HOST_CONTROL_FUNCTION) : NULL;
    host_control_fn *get;
    if (!symbol || setenv("KVANT_CUDA_LIBRARY", argv[1], 1) != 0)
        return 2;
    memcpy(&get, &symbol, sizeof get);
    host = get();
    return run_cases(NULL, NULL);
}
