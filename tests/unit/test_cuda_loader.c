/* test_cuda_loader.c - how libkvant finds and judges libkvant_cuda.so, with the mock of
 * tests/cuda/host in its place. Needs no GPU.
 *
 * Argument: the path of the mock. A library that was accepted stays, so refusals are tested
 * first. */
#include "testing.h"

#include <dlfcn.h>
#include <pthread.h>

#include "../cuda/host/host.h"
#include "calibrated.h"

static const char *library;
static host_control *host;

static void expect_refusal(const char *file, const char *words)
{
    char err[512] = "";
    kvant_cuda_codec *codec = (kvant_cuda_codec *)&err;
    setenv("KVANT_CUDA_LIBRARY", file, 1);
    assert_int_equal(kvant_cuda_available(err, sizeof err), KVANT_ERR_UNSUPPORTED);
    if (!strstr(err, words))
        fail_msg("%s: '%s' does not say '%s'", file, err, words);
    err[0] = 0;
    assert_int_equal(kvant_cuda_codec_create("int-4", 64, KVANT_ROLE_K, 0, &codec, err, sizeof err),
                     KVANT_ERR_UNSUPPORTED);
    assert_null(codec);
    assert_non_null(strstr(err, words));
    assert_int_equal(kvant_cuda_available(NULL, 0), KVANT_ERR_UNSUPPORTED);
    assert_non_null(strstr(kvant_error_message(), words));
    assert_int_equal(kvant_cuda_attention_workspace(64), 0);
    assert_int_equal(kvant_cuda_append(NULL, NULL), KVANT_ERR_UNSUPPORTED);
}

/* A spec that the CPU refuses needs no library. */
CASE(specs_are_refused_first)
{
    char err[512] = "";
    kvant_cuda_codec *codec;
    assert_int_equal(
        kvant_cuda_codec_create("nonsense", 64, KVANT_ROLE_K, 0, &codec, err, sizeof err),
        KVANT_ERR_SPEC);
    assert_non_null(strstr(err, "nonsense"));
}

/* Without the variable the loader's own path is searched, which has none here. */
CASE(a_missing_library_is_refused)
{
    char err[512] = "";
    unsetenv("KVANT_CUDA_LIBRARY");
    assert_int_equal(kvant_cuda_available(err, sizeof err), KVANT_ERR_UNSUPPORTED);
    assert_non_null(strstr(err, "libkvant_cuda.so"));
}

CASE(other_libraries_are_refused)
{
    expect_refusal("/nowhere/libkvant_cuda.so", "/nowhere/libkvant_cuda.so");
    expect_refusal("/nowhere/libkvant_cuda.so", "KVANT_CUDA_LIBRARY");
    expect_refusal("libm.so.6", "kvant_cuda_table_get");
    host->version = 4711;
    expect_refusal(library, "version 4711");
    host->version = 0;
    host->view_bytes = 8;
    expect_refusal(library, "other structs");
    host->view_bytes = 0;
    host->args_bytes = 8;
    expect_refusal(library, "other structs");
    host->args_bytes = 0;
}

static void answer(kvant_status status, const char *said)
{
    host->answer = status;
    host->said = said;
}

static void *open_at_once(void *argument)
{
    char err[512] = "";
    return kvant_cuda_available(err, sizeof err) == KVANT_ERR_UNSUPPORTED &&
                   strcmp(err, "no GPU here") == 0
               ? NULL
               : "failed";
}

CASE(threads_open_it_together)
{
    pthread_t threads[8];
    setenv("KVANT_CUDA_LIBRARY", library, 1);
    answer(KVANT_ERR_UNSUPPORTED, "no GPU here");
    for (int i = 0; i < 8; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, open_at_once, NULL), 0);
    for (int i = 0; i < 8; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    answer(KVANT_OK, NULL);
}

/* The arrays that engines copy to the device; no library is needed for them. */
CASE(tables_are_those_of_the_calibration)
{
    static const struct {
        const char *spec;
        kvant_role role;
        size_t key_transform_size;
        bool center, scale;
    } cases[] = { { "int-4", KVANT_ROLE_K, 0, false, false },
                  { "int-4:center=file,norm=file", KVANT_ROLE_V, 0, true, true },
                  { "int-4:transform=diagonal", KVANT_ROLE_K, 32, true, false },
                  { "trellis-4:transform=file", KVANT_ROLE_K, 32 * 32, true, false } };
    kvant_calibration *calibration = calibrate_fixed(32);
    assert_non_null(calibration);
    for (size_t i = 0; i < COUNT(cases); i++) {
        kvant_codec *codec;
        kvant_calibration_entry entry = { .size = sizeof entry };
        kvant_cuda_tables tables = { .size = sizeof tables };
        assert_ok(kvant_codec_create_calibrated(cases[i].spec, 32, cases[i].role, 0, calibration, 1,
                                                1, &codec, NULL, 0));
        assert_ok(kvant_calibration_get_entry(calibration, 1, 1, cases[i].role, &entry));
        assert_int_equal(kvant_cuda_codec_tables(codec, &tables), KVANT_OK);
        assert_int_equal(tables.key_transform_size, cases[i].key_transform_size);
        assert_int_equal(tables.key_transform != NULL, cases[i].key_transform_size > 0);
        assert_int_equal(tables.scale != NULL, cases[i].scale);
        assert_int_equal(tables.center != NULL, cases[i].center);
        if (tables.center)
            assert_memory_equal(tables.center, entry.mean, 32 * sizeof(float));
        for (size_t j = 0; tables.key_transform_size == 32 && j < 32; j++) {
            assert_true(tables.key_transform[j] == entry.diagonal[j]);
            assert_true(fabsf(tables.key_transform[j] * tables.inverse_key_transform[j] - 1) <
                        1e-6f);
        }
        tables.size = offsetof(kvant_cuda_tables, key_transform_size); /* of no version */
        assert_int_equal(kvant_cuda_codec_tables(codec, &tables), KVANT_ERR_ARGUMENT);
        assert_int_equal(kvant_cuda_codec_tables(NULL, &tables), KVANT_ERR_ARGUMENT);
        kvant_codec_free(&codec);
    }
    kvant_calibration_free(&calibration);
}

CASE(codecs_cross_as_views)
{
    static const struct {
        const char *spec;
        kvant_code_kind kind;
    } cases[] = { { "int-4", KVANT_CODES_UNIFORM },
                  { "turboquant-3", KVANT_CODES_CODEBOOK },
                  { "trellis-2", KVANT_CODES_TRELLIS } };
    kvant_cuda_codec *codec, *open;
    char err[512] = "";
    for (size_t i = 0; i < COUNT(cases); i++) {
        kvant_codec *source;
        kvant_codec_info info = { .size = sizeof info };
        assert_ok(kvant_codec_create(cases[i].spec, 64, KVANT_ROLE_V, 0, &source, NULL, 0));
        assert_int_equal(kvant_cuda_codec_from(source, &codec, err, sizeof err), KVANT_OK);
        assert_int_equal(host->kind, cases[i].kind);
        assert_int_equal(kvant_cuda_codec_get_info(codec, &info), KVANT_OK);
        assert_string_equal(info.spec, info_of(source).spec);
        assert_int_equal(info.page_bytes, info_of(source).page_bytes);
        kvant_codec_free(&source);
        kvant_cuda_codec_free(&codec);
        assert_null(codec);
        assert_int_equal(host->freed, i + 1);
    }
    assert_int_equal(kvant_cuda_codec_create("f16", 72, KVANT_ROLE_K, 0, &codec, err, sizeof err),
                     KVANT_ERR_UNSUPPORTED);
    assert_int_equal(host->kind, KVANT_CODES_NONE);
    assert_non_null(strstr(err, "not on the GPU: head_dim 72"));
    assert_string_equal(kvant_error_message(), err);
    assert_null(codec);
    assert_ok(kvant_cuda_codec_create("int-4", 64, KVANT_ROLE_K, 0, &codec, NULL, 0));
    assert_int_equal(kvant_cuda_codec_create_open(codec, &open), KVANT_OK);
    assert_ptr_equal(host->codec, codec);
    kvant_cuda_codec_free(&open);
    assert_int_equal(kvant_cuda_codec_create_open(NULL, &open), KVANT_ERR_ARGUMENT);
    assert_null(open);
    assert_int_equal(kvant_cuda_codec_create_open(codec, NULL), KVANT_ERR_ARGUMENT);
    answer(KVANT_ERR_FORMAT, "no such pair");
    assert_int_equal(kvant_cuda_attention_check(codec, codec, err, sizeof err), KVANT_ERR_FORMAT);
    assert_string_equal(err, "no such pair");
    assert_ptr_equal(host->codec, codec);
    answer(KVANT_OK, NULL);
    kvant_cuda_codec_free(&codec);
    kvant_cuda_codec_free(NULL);
}

/* Each struct of cuda.h is the first part of a struct of cuda_kernels.h, member by member. */
#define SAME(type, member)                                                                         \
    _Static_assert(offsetof(kvant_cuda_##type, member) ==                                          \
                           offsetof(kvant_cuda_kernel_##type, member) &&                           \
                       sizeof(((kvant_cuda_##type *)0)->member) ==                                 \
                           sizeof(((kvant_cuda_kernel_##type *)0)->member),                        \
                   #member " is elsewhere in kvant_cuda_kernel_" #type)
SAME(query_args, size);
SAME(query_args, k_codec);
SAME(query_args, batch);
SAME(query_args, n_heads);
SAME(query_args, n_kv_heads);
SAME(query_args, type);
SAME(query_args, q);
SAME(query_args, q_batch_stride);
SAME(query_args, q_head_stride);
SAME(query_args, inverse_key_transform);
SAME(query_args, out);
SAME(append_args, size);
SAME(append_args, k);
SAME(append_args, v);
SAME(append_args, type);
SAME(append_args, n_tokens);
SAME(append_args, n_kv_heads);
SAME(append_args, slots);
SAME(append_args, refused);
SAME(append_args, exact);
SAME(append_args, transformed);
SAME(append_args, k_feedback);
SAME(append_args, centroids);
SAME(attention_args, size);
SAME(attention_args, k_codec);
SAME(attention_args, v_codec);
SAME(attention_args, k);
SAME(attention_args, v);
SAME(attention_args, k_open);
SAME(attention_args, v_open);
SAME(attention_args, block_table);
SAME(attention_args, table_stride);
SAME(attention_args, blocks_per_row);
SAME(attention_args, lengths);
SAME(attention_args, batch);
SAME(attention_args, n_heads);
SAME(attention_args, n_kv_heads);
SAME(attention_args, type);
SAME(attention_args, q);
SAME(attention_args, q_batch_stride);
SAME(attention_args, q_head_stride);
SAME(attention_args, out);
SAME(attention_args, out_batch_stride);
SAME(attention_args, out_head_stride);
SAME(attention_args, lse);
SAME(attention_args, scale);
SAME(attention_args, v_center);
SAME(attention_args, k_scale);
SAME(attention_args, v_scale);
SAME(attention_args, workspace);
SAME(attention_args, workspace_bytes);
SAME(attention_args, query_tokens);
SAME(attention_args, query_starts);
SAME(attention_args, q_token_stride);
SAME(attention_args, out_token_stride);
SAME(attention_args, causal);
SAME(attention_args, window);
SAME(attention_args, logit_softcap);
SAME(attention_args, max_bias);
SAME(attention_args, mask);
SAME(attention_args, mask_token_stride);
SAME(attention_args, sinks);
SAME(attention_args, centroids);
SAME(attention_args, k_center);

CASE(calls_reach_the_table)
{
    kvant_cuda_stream stream = &library;
    kvant_cuda_kernel_append_args append = { .size = sizeof append };
    kvant_cuda_seal_args seal = { .size = sizeof seal };
    kvant_cuda_kernel_attention_args attention = { .size = sizeof attention };
    kvant_cuda_kernel_query_args queries = { .size = sizeof queries };
    kvant_cuda_center_rows_args center = { .size = sizeof center };
    kvant_cuda_page_offsets_args offsets = { .size = sizeof offsets };
    kvant_cuda_marked_args marked = { .size = sizeof marked };
    kvant_cuda_block_args rows = { .size = sizeof rows };
    kvant_cuda_decode_args decode = { .size = sizeof decode };
    kvant_cuda_exact_args exact = { .size = sizeof exact };
    kvant_cuda_seal_rows_args listed = { .size = sizeof listed };
    answer(KVANT_ERR_FULL, NULL); /* none of these functions returns this by itself */
#define REACHES(name, call, args)                                                                  \
    assert_int_equal(call, KVANT_ERR_FULL);                                                        \
    assert_string_equal(host->function, "host_" #name);                                            \
    assert_memory_equal(host->arguments, &(args), sizeof(args));                                   \
    assert_ptr_equal(host->stream, stream)
    REACHES(append, kvant_cuda_kernel_append(&append, stream), append);
    REACHES(seal, kvant_cuda_seal(&seal, stream), seal);
    REACHES(attention, kvant_cuda_kernel_attention(&attention, stream), attention);
    REACHES(block_attention, kvant_cuda_block_attention(&rows, stream), rows);
    REACHES(transform_queries, kvant_cuda_kernel_transform_queries(&queries, stream), queries);
    REACHES(center_rows, kvant_cuda_center_rows(&center, stream), center);
    REACHES(page_offsets, kvant_cuda_page_offsets(&offsets, stream), offsets);
    REACHES(fill_marked, kvant_cuda_fill_marked(&marked, stream), marked);
    REACHES(decode, kvant_cuda_decode(&decode, stream), decode);
    REACHES(exact_step, kvant_cuda_exact_step(&exact, stream), exact);
    REACHES(seal_rows, kvant_cuda_seal_rows(&listed, stream), listed);
    answer(KVANT_OK, NULL);
    assert_int_equal(kvant_cuda_attention_workspace(128), 384);
    assert_int_equal(kvant_cuda_kernel_workspace(128, 5), 896);
    kvant_cuda_limit_shared_memory(99 << 10);
    assert_int_equal(host->shared_limit, 99 << 10);
    assert_int_equal(kvant_cuda_append(NULL, stream), KVANT_ERR_ARGUMENT);
    kvant_cuda_append_args old = { .size = offsetof(kvant_cuda_append_args, refused) };
    assert_int_equal(kvant_cuda_append(&old, stream), KVANT_ERR_ARGUMENT); /* of no version */
}

/* The table is given the members of cuda.h where they are, and zeros behind them. */
CASE(short_structs_become_whole_ones)
{
    answer(KVANT_ERR_FULL, NULL);
#define BECOMES(name, type)                                                                        \
    do {                                                                                           \
        kvant_cuda_##type given;                                                                   \
        memset(&given, 0x5a, sizeof given);                                                        \
        given.size = sizeof given;                                                                 \
        kvant_cuda_kernel_##type want = { 0 };                                                     \
        memcpy(&want, &given, sizeof given);                                                       \
        want.size = sizeof want;                                                                   \
        assert_int_equal(kvant_cuda_##name(&given, NULL), KVANT_ERR_FULL);                         \
        assert_string_equal(host->function, "host_" #name);                                        \
        assert_memory_equal(host->arguments, &want, sizeof want);                                  \
    } while (0)
    BECOMES(append, append_args);
    BECOMES(attention, attention_args);
    BECOMES(transform_queries, query_args);
    answer(KVANT_OK, NULL);
}

/* A caller of a later version: what this one does not know has to be zero. */
CASE(longer_structs_are_taken)
{
    struct {
        kvant_cuda_decode_args args;
        size_t later;
    } decode = { .args = { .size = sizeof decode, .n_blocks = 3 } };
    kvant_cuda_decode_args got;
    answer(KVANT_ERR_CUDA, NULL);
    assert_int_equal(kvant_cuda_decode(&decode.args, NULL), KVANT_ERR_CUDA);
    memcpy(&got, host->arguments, sizeof got);
    assert_int_equal(got.size, sizeof got);
    assert_int_equal(got.n_blocks, 3);
    decode.later = 1;
    assert_int_equal(kvant_cuda_decode(&decode.args, NULL), KVANT_ERR_ARGUMENT);
    answer(KVANT_OK, NULL);
}

/* The library stays open, so its settings stay between the calls of libkvant. */
static host_control *open_host(void)
{
    void *handle = dlopen(library, RTLD_NOW);
    void *symbol = handle ? dlsym(handle, HOST_CONTROL_FUNCTION) : NULL;
    host_control_fn *get;
    if (!symbol)
        exit(2);
    memcpy(&get, &symbol, sizeof get);
    return get();
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    library = argv[1];
    host = open_host();
    return run_cases(NULL, NULL);
}
