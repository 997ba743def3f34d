/* test_index_file.c - files of indexes: a saved index finds the same vectors, read or mapped. A
 * file with any flipped bit or a wrong length is refused. */
#include <kvant/index.h>

#include <unistd.h>

#include "testing.h"

enum { DIM = 24, N = 45 };

typedef struct files {
    char folder[64], path[128];
    float rows[N * DIM];
} files;

static files make_files(void)
{
    files f = { .folder = "/tmp/kvant-test-XXXXXX" };
    uint64_t rng = 3;
    assert_non_null(mkdtemp(f.folder));
    snprintf(f.path, sizeof f.path, "%s/index.kvidx", f.folder);
    fill_normal(f.rows, N * DIM, &rng);
    return f;
}

static void remove_files(const files *f)
{
    unlink(f->path);
    assert_int_equal(rmdir(f->folder), 0); /* the folder is empty: no temporary file is left */
}

static kvant_index *make(const files *f, const char *spec, kvant_metric metric, bool ids)
{
    kvant_index_params params = {
        .size = sizeof params, .dim = DIM, .metric = metric, .spec = spec
    };
    kvant_index *index;
    uint64_t numbers[N];
    for (uint64_t i = 0; i < N; i++)
        numbers[i] = i * 7919 % 1000003;
    assert_int_equal(kvant_index_create(&params, &index, NULL, 0), KVANT_OK);
    if (strchr(spec, ':'))
        assert_int_equal(kvant_index_train(index, f->rows, DIM, N), KVANT_OK);
    assert_int_equal(kvant_index_add(index, f->rows, DIM, N, ids ? numbers : NULL, 1), KVANT_OK);
    return index;
}

typedef struct found {
    float scores[3 * N];
    uint64_t ids[3 * N];
} found;

static found search(const files *f, const kvant_index *index)
{
    found r;
    const kvant_index_query query = {
        .size = sizeof query, .rows = f->rows, .stride = DIM, .n = 3, .k = N, .n_probe = 3
    };
    memset(&r, 0, sizeof r);
    assert_int_equal(kvant_index_search(index, &query, r.scores, r.ids), KVANT_OK);
    return r;
}

static void save(const kvant_index *index, const char *path)
{
    char err[256] = "";
    if (kvant_index_save(index, path, err, sizeof err) != KVANT_OK)
        fail_msg("%s", err);
}

typedef kvant_status open_fn(const char *path, kvant_index **index, char *err, size_t errlen);

static kvant_index *opened(open_fn *open, const char *path)
{
    char err[256] = "";
    kvant_index *index;
    if (open(path, &index, err, sizeof err) != KVANT_OK)
        fail_msg("%s", err);
    return index;
}

CASE(saved_and_found)
{
    static const char *const specs[] = { "turboquant-1",
                                         "turboquant-2:seed=5",
                                         "turboquant-3:dims=10",
                                         "turboquant-4",
                                         "turboquant-8",
                                         "turboquant-2:lists=3",
                                         "trellis-3:seed=5",
                                         "trellis-2:lists=2,rows=int8",
                                         "int-3:asym" };
    files f = make_files();
    for (size_t s = 0; s < COUNT(specs); s++)
        for (int metric = 0; metric < 3; metric++)
            for (int ids = 0; ids < 2; ids++) {
                kvant_index *index = make(&f, specs[s], (kvant_metric)metric, ids);
                if (ids)
                    assert_int_equal(kvant_index_remove(index, 3 * 7919), KVANT_OK);
                const found want = search(&f, index);
                kvant_index_info before = { .size = sizeof before }, after = before;
                save(index, f.path);
                for (int view = 0; view < 2; view++) {
                    kvant_index *again = opened(view ? kvant_index_view : kvant_index_load, f.path);
                    const found got = search(&f, again);
                    assert_memory_equal(&got, &want, sizeof got);
                    assert_int_equal(kvant_index_get_info(index, &before), KVANT_OK);
                    assert_int_equal(kvant_index_get_info(again, &after), KVANT_OK);
                    assert_string_equal(before.spec, after.spec);
                    assert_true(after.n == before.n && after.file_bytes == before.file_bytes &&
                                after.is_view == view);
                    assert_int_equal(kvant_index_verify(again), KVANT_OK);
                    assert_int_equal(kvant_index_add(again, f.rows, DIM, 1, NULL, 1),
                                     view ? KVANT_ERR_UNSUPPORTED : KVANT_OK);
                    assert_int_equal(kvant_index_remove(again, 7919 * (ids ? 1 : 0)),
                                     view ? KVANT_ERR_UNSUPPORTED : KVANT_OK);
                    kvant_index_free(&again);
                }
                kvant_index_free(&index);
            }
    remove_files(&f);
}

/* Empties an index. New ids continue after the largest id that was ever used. */
CASE(emptied)
{
    files f = make_files();
    kvant_index *index = make(&f, "turboquant-4", KVANT_METRIC_INNER_PRODUCT, false);
    for (uint64_t id = 0; id < N; id++)
        assert_int_equal(kvant_index_remove(index, id), KVANT_OK);
    save(index, f.path);
    kvant_index *again = opened(kvant_index_load, f.path);
    assert_int_equal(kvant_index_add(again, f.rows, DIM, 1, NULL, 1), KVANT_OK);
    const found r = search(&f, again);
    assert_true(r.ids[0] == N && r.ids[1] == KVANT_INDEX_NO_ID);
    kvant_index_free(&again);
    kvant_index_free(&index);
    remove_files(&f);
}

static uint8_t *read_bytes(const char *path, size_t *n)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    uint8_t *bytes = malloc(1 << 20);
    *n = fread(bytes, 1, 1 << 20, file);
    fclose(file);
    return bytes;
}

static void write_bytes(const char *path, const uint8_t *bytes, size_t n)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

static void refused(open_fn *open, const char *path, kvant_status status)
{
    char err[256] = "";
    kvant_index *index = (kvant_index *)err;
    assert_int_equal(open(path, &index, err, sizeof err), status);
    assert_null(index);
    assert_true(err[0] != 0);
}

/* Opening a view verifies the head of the file. The rest is verified on request. */
static void refused_or_found(const char *path, size_t at)
{
    kvant_index *view = NULL;
    refused(kvant_index_load, path, KVANT_ERR_FORMAT);
    if (kvant_index_view(path, &view, NULL, 0) == KVANT_OK) {
        /* damage after the head, or in the checksum of the whole file */
        assert_true(at >= 256 || (at >= 40 && at < 48));
        assert_int_equal(kvant_index_verify(view), KVANT_ERR_FORMAT);
    }
    kvant_index_free(&view);
}

CASE(flipped_bits)
{
    files f = make_files();
    size_t n;
    kvant_index *index = make(&f, "turboquant-2:dims=7,lists=2", KVANT_METRIC_L2, true);
    save(index, f.path);
    uint8_t *bytes = read_bytes(f.path, &n);
    for (size_t at = 0; at < n; at++) {
        bytes[at] ^= (uint8_t)(1u << at % 8);
        write_bytes(f.path, bytes, n);
        refused_or_found(f.path, at);
        bytes[at] ^= (uint8_t)(1u << at % 8);
    }
    free(bytes);
    kvant_index_free(&index);
    remove_files(&f);
}

CASE(other_lengths)
{
    files f = make_files();
    size_t n;
    kvant_index *index = make(&f, "turboquant-4", KVANT_METRIC_COSINE, false);
    save(index, f.path);
    uint8_t *bytes = read_bytes(f.path, &n);
    for (size_t length = 0; length < n; length += 1 + length / 40) {
        write_bytes(f.path, bytes, length);
        refused(kvant_index_load, f.path, KVANT_ERR_FORMAT);
        refused(kvant_index_view, f.path, KVANT_ERR_FORMAT);
    }
    memset(bytes + n, 0, 64);
    write_bytes(f.path, bytes, n + 64);
    refused(kvant_index_load, f.path, KVANT_ERR_FORMAT);
    refused(kvant_index_view, f.path, KVANT_ERR_FORMAT);
    free(bytes);
    kvant_index_free(&index);
    remove_files(&f);
    refused(kvant_index_load, f.path, KVANT_ERR_IO);
    refused(kvant_index_view, f.path, KVANT_ERR_IO);
}

/* A save that fails leaves the old file, and a view goes on with the file that it was opened on. */
CASE(failed_and_replaced)
{
    files f = make_files();
    char err[256] = "", nowhere[160];
    kvant_index *index = make(&f, "turboquant-4", KVANT_METRIC_COSINE, false);
    const found want = search(&f, index);
    snprintf(nowhere, sizeof nowhere, "%s/none/index", f.folder);
    assert_int_equal(kvant_index_save(index, nowhere, err, sizeof err), KVANT_ERR_IO);
    save(index, f.path);
    kvant_index *view = opened(kvant_index_view, f.path);
    assert_int_equal(kvant_index_remove(index, 0), KVANT_OK);
    save(index, f.path);
    const found still = search(&f, view);
    assert_memory_equal(&still, &want, sizeof want);
    save(view, f.path);
    kvant_index_free(&view);
    view = opened(kvant_index_view, f.path);
    const found again = search(&f, view);
    assert_memory_equal(&again, &want, sizeof want);
    kvant_index_free(&view);
    kvant_index_free(&index);
    remove_files(&f);
}

/* Another program writes a shorter file over the file of a view. Windows does not let it. */
#ifdef _WIN32
CASE(cut_while_open)
{
    files f = make_files();
    kvant_index *index = make(&f, "turboquant-4", KVANT_METRIC_COSINE, true);
    save(index, f.path);
    kvant_index *view = opened(kvant_index_view, f.path);
    assert_int_not_equal(truncate(f.path, 64), 0);
    assert_int_equal(kvant_index_verify(view), KVANT_OK);
    kvant_index_free(&view);
    kvant_index_free(&index);
    remove_files(&f);
}
#else
CASE(cut_while_open)
{
    files f = make_files();
    float row[DIM], score;
    uint64_t id;
    char err[256] = "";
    kvant_index *index = make(&f, "turboquant-4", KVANT_METRIC_COSINE, true);
    save(index, f.path);
    kvant_index *view = opened(kvant_index_view, f.path);
    assert_int_equal(truncate(f.path, 64), 0);
    const kvant_index_query query = {
        .size = sizeof query, .rows = f.rows, .stride = DIM, .n = 1, .k = 1
    };
    assert_int_equal(kvant_index_search(view, &query, &score, &id), KVANT_ERR_FORMAT);
    assert_non_null(strstr(kvant_error_message(), "cut short"));
    assert_int_equal(kvant_index_reconstruct(view, 0, row), KVANT_ERR_FORMAT);
    assert_int_equal(kvant_index_verify(view), KVANT_ERR_FORMAT);
    assert_int_equal(kvant_index_save(view, f.path, err, sizeof err), KVANT_ERR_FORMAT);
    kvant_index_free(&view);
    kvant_index_free(&index);
    remove_files(&f);
}
#endif

/* No part of a removed vector is in the file, nor its id, whether the removed vector was the last
 * or others come after it. */
CASE(removed_vectors_are_gone)
{
    static const char *const specs[] = { "turboquant-4", "turboquant-4:lists=2,rows=int8",
                                         "int-3:asym" };
    static const uint64_t marked = 0x6b76616e745f6964u;
    files f = make_files();
    for (size_t i = 0; i < 2 * COUNT(specs); i++)
        for (int more = 0; more < 2; more++) {
            kvant_index *index = make(&f, specs[i / 2], (kvant_metric)(i % 3), i % 2);
            const uint64_t after = 5000000;
            size_t n;
            assert_int_equal(kvant_index_add(index, f.rows, DIM, 1, &marked, 1), KVANT_OK);
            for (uint64_t id = after; id < after + 40 * (uint64_t)more; id++)
                assert_int_equal(kvant_index_add(index, f.rows + DIM, DIM, 1, &id, 1), KVANT_OK);
            assert_int_equal(kvant_index_remove(index, marked), KVANT_OK);
            for (uint64_t id = after; id < after + 39 * (uint64_t)more; id++)
                assert_int_equal(kvant_index_remove(index, id), KVANT_OK);
            save(index, f.path);
            uint8_t *bytes = read_bytes(f.path, &n);
            for (size_t at = 0; at + sizeof marked <= n; at++)
                if (memcmp(bytes + at, &marked, sizeof marked) == 0)
                    fail_msg("%s: the id is at byte %zu of %zu", specs[i / 2], at, n);
            free(bytes);
            kvant_index_free(&index);
        }
    remove_files(&f);
}

RUN_CASES(NULL, NULL)
