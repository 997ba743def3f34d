/* test_calibration_file.c - files of calibrations and checkpoints of calibrators: a saved object
 * loads again, and damaged or false files are refused. */
#include "calibration_fixture.h"

#include <sys/stat.h>
#include <unistd.h>

typedef struct file {
    char folder[64], path[96];
    uint8_t *bytes;
    size_t n;
} file;

static file make_file(void)
{
    file f = { .folder = "/tmp/kvant-test-XXXXXX" };
    assert_non_null(mkdtemp(f.folder));
    snprintf(f.path, sizeof f.path, "%s/model.kvcal", f.folder);
    kvant_calibration *c = make_calibration(2, 1);
    char err[256] = "";
    if (kvant_calibration_save(c, f.path, err, sizeof err) != KVANT_OK)
        fail_msg("%s", err);
    kvant_calibration_info info = { .size = sizeof info };
    assert_int_equal(kvant_calibration_get_info(c, &info), KVANT_OK);
    kvant_calibration_free(&c);
    f.bytes = malloc(info.bytes + 16);
    FILE *in = fopen(f.path, "rb");
    assert_non_null(in);
    f.n = fread(f.bytes, 1, info.bytes + 16, in);
    assert_int_equal(f.n, info.bytes);
    fclose(in);
    return f;
}

static void drop_file(file *f)
{
    unlink(f->path);
    assert_int_equal(rmdir(f->folder), 0); /* fails when a temporary file was left behind */
    free(f->bytes);
}

static void expect(const file *f, size_t n, kvant_status expected, const char *words)
{
    char err[256] = "";
    kvant_calibration *c = (kvant_calibration *)(uintptr_t)1;
    FILE *out = fopen(f->path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(f->bytes, 1, n, out), n);
    fclose(out);
    kvant_status status = kvant_calibration_load(f->path, &c, err, sizeof err);
    if (status != expected || !strstr(err, words))
        fail_msg("%s: \"%s\" for a file of %zu bytes, expected %s with \"%s\"",
                 kvant_strerror(status), err, n, kvant_strerror(expected), words);
    assert_true((c != NULL) == (status == KVANT_OK));
    kvant_calibration_free(&c);
}

CASE(files_come_back_as_they_were)
{
    file f = make_file();
    kvant_calibration *a = make_calibration(2, 1), *b;
    assert_int_equal(kvant_calibration_load(f.path, &b, NULL, 0), KVANT_OK);
    for (uint32_t role = 0; role < 2; role++) {
        kvant_calibration_entry x = entry_of(a, 2, 1, (kvant_role)role),
                                y = entry_of(b, 2, 1, (kvant_role)role);
        assert_memory_equal(x.mean, y.mean, DIM * sizeof(float));
        assert_memory_equal(x.min, y.min, DIM * sizeof(float));
        assert_memory_equal(x.max, y.max, DIM * sizeof(float));
        assert_memory_equal(x.centroids[0], y.centroids[0], 4 * DIM * sizeof(float));
        assert_memory_equal(x.centroids[1], y.centroids[1], 16 * DIM * sizeof(float));
        assert_true((x.matrix != NULL) == (role == KVANT_ROLE_K) &&
                    (x.diagonal != NULL) == (role == KVANT_ROLE_K));
        if (role == KVANT_ROLE_V)
            continue;
        assert_memory_equal(x.query_moment, y.query_moment, DIM * DIM * sizeof(float));
        assert_memory_equal(x.diagonal, y.diagonal, DIM * sizeof(float));
        assert_memory_equal(x.matrix, y.matrix, DIM * (DIM + 1) / 2 * sizeof(uint16_t));
    }
    /* replaces the old file */
    assert_int_equal(kvant_calibration_save(b, f.path, NULL, 0), KVANT_OK);
    kvant_calibration_free(&a);
    kvant_calibration_free(&b);
    drop_file(&f);
}

CASE(cut_files_are_refused)
{
    file f = make_file();
    for (size_t n = 0; n < 64; n++)
        expect(&f, n, KVANT_ERR_FORMAT, "not a calibration file");
    for (size_t n = 64; n < f.n; n += n < 350 ? 1 : 4999)
        expect(&f, n, KVANT_ERR_FORMAT, "cut short");
    memset(f.bytes + f.n, 0, 16);
    expect(&f, f.n + 16, KVANT_ERR_FORMAT, "too long");
    expect(&f, f.n, KVANT_OK, "");
    drop_file(&f);
}

static const char *damage_at(size_t byte)
{
    return byte < 8                  ? "not a calibration file"
           : byte < 12               ? "version"
           : byte < 16 || byte >= 24 ? "checksum"
                                     : "";
}

CASE(flipped_bits_are_refused)
{
    file f = make_file();
    for (size_t byte = 0; byte < f.n; byte += byte < 350 ? 1 : 4999)
        for (uint32_t bit = 0; bit < 8; bit += byte < 64 ? 1 : 3) {
            f.bytes[byte] ^= (uint8_t)(1u << bit);
            expect(&f, f.n, KVANT_ERR_FORMAT, damage_at(byte));
            f.bytes[byte] ^= (uint8_t)(1u << bit);
        }
    drop_file(&f);
}

static void put(file *f, size_t at, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        f->bytes[at + i] = (uint8_t)(value >> 8 * i);
}

/* FNV-1a with bytes 24 .. 31 read as zero, written a second time from calibration.md. */
static void sign(file *f)
{
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < f->n; i++)
        hash = (hash ^ (i / 8 == 3 ? 0 : f->bytes[i])) * 1099511628211u;
    put(f, 24, hash, 8);
}

/* Offset of the first entry's factors. The entry begins at 320 with mean, min, max and the second
 * moment. */
enum { FACTORS = 320 + 4 * (3 * HEADS * DIM + HEADS * DIM * DIM) };

/* With a valid checksum, only the checks of the fields themselves can refuse the file. */
CASE(lying_fields_are_refused)
{
    static const struct {
        size_t at;
        uint64_t value;
        size_t bytes;
        const char *words;
    } lies[] = {
        { 12, 0, 4, "a count in its head" },
        { 12, 0xffffffff, 4, "a count in its head" },
        { 12, 5, 4, "damaged" },
        { 12, 7, 4, "damaged" },
        { 12, 8192, 4, "table is longer" },
        { 56, 256, 4, "a count in its head" },
        { 56, 8, 4, "holds a zero" },
        { 60, 9, 4, "a count in its head" },
        { 60, 1, 4, "damaged" },
        { 64, 1, 4, "clusters" },
        { 64, 16, 4, "clusters" },
        { 68, 4097, 4, "clusters" },
        { 128, 4096, 4, "entry" },
        { 132, 2, 4, "entry" },
        { 136, 0, 4, "entry" },
        { 136, 4096, 4, "arrays are longer" },
        { 136, 0xffffffff, 4, "entry" },
        { 140, 0, 4, "entry" },
        { 140, 513, 4, "entry" },
        { 140, 512, 4, "arrays are longer" },
        { 144, 1, 8, "entry" },
        { 128, 1, 4, "order" },
        { 320, 0x7fc00000, 4, "a NaN or an infinity" },
        { 320, 0xff800000, 4, "a NaN or an infinity" },
        { FACTORS, 0, 4, "not larger than 0" },
        { FACTORS + 4, 0xbf800000, 4, "not larger than 0" },
        { FACTORS + 8, 0x7fc00000, 4, "a NaN or an infinity" },
        { FACTORS + 4 * HEADS * DIM, 0x7c00, 2, "a NaN or an infinity" },
        { FACTORS + 4 * HEADS * DIM + 2, 0xfe01, 2, "a NaN or an infinity" },
        { FACTORS + 4 * HEADS * DIM + HEADS * DIM * (DIM + 1), 0x7f800000, 4,
          "a NaN or an infinity" }, /* a centroid */
    };
    file f = make_file();
    sign(&f);
    expect(&f, f.n, KVANT_OK, ""); /* the checksum above is the documented one */
    uint8_t *whole = malloc(f.n);
    memcpy(whole, f.bytes, f.n);
    for (size_t i = 0; i < COUNT(lies); i++) {
        put(&f, lies[i].at, lies[i].value, lies[i].bytes);
        sign(&f);
        expect(&f, f.n, KVANT_ERR_FORMAT, lies[i].words);
        memcpy(f.bytes, whole, f.n);
    }
    put(&f, 8, 1, 4);
    sign(&f);
    expect(&f, f.n, KVANT_ERR_FORMAT,
           "version 1, this library reads version 2: make it again with kvant calibrate");
    free(whole);
    drop_file(&f);
}

/* Checkpoints */

static kvant_calibrator *calibrator_of(uint64_t seed)
{
    kvant_calibrator_config config = { .size = sizeof config,
                                       .model = "a model",
                                       .seed = seed,
                                       .clusters = few_clusters,
                                       .n_codebooks = 2 };
    kvant_calibrator *calibrator;
    assert_int_equal(kvant_calibrator_create(&config, &calibrator, NULL, 0), KVANT_OK);
    return calibrator;
}

/* Adds rows of one of several layers of keys and values, with attention on keys. */
static void add_some(kvant_calibrator *calibrator, const data *all, uint32_t layer)
{
    kvant_calibrator_attention attention = { .size = sizeof attention,
                                             .keys = all->rows[layer][0],
                                             .key_stride = HEADS * DIM,
                                             .n_keys = ROWS,
                                             .queries = all->queries[layer][0],
                                             .query_stride = DIM,
                                             .n_queries = 3,
                                             .scale = 0.1f };
    for (uint32_t role = 0; role < 2; role++)
        assert_ok(kvant_calibrator_add_rows(calibrator, layer, (kvant_role)role, HEADS, DIM,
                                            all->rows[layer][role], HEADS * DIM, ROWS));
    assert_ok(
        kvant_calibrator_add_queries(calibrator, layer, 1, DIM, all->queries[layer][1], DIM, ROWS));
    assert_ok(kvant_calibrator_add_attention(calibrator, layer, 0, DIM, 64, &attention));
}

static void save_to(kvant_calibrator *calibrator, const char *path)
{
    kvant_calibration *c = finish(calibrator);
    assert_int_equal(kvant_calibration_save(c, path, NULL, 0), KVANT_OK);
    kvant_calibration_free(&c);
}

static uint8_t *read_whole(const char *path, size_t *n)
{
    uint8_t *bytes = malloc(1 << 22);
    FILE *in = fopen(path, "rb");
    assert_true(bytes && in);
    *n = fread(bytes, 1, 1 << 22, in);
    fclose(in);
    return bytes;
}

/* Work that is interrupted while gathering, and again between layers of k-means, makes the same
 * file as work without interruption. */
CASE(work_goes_on_where_it_stopped)
{
    data *all = make_data();
    file f = make_file();
    char part[128];
    snprintf(part, sizeof part, "%s/part", f.folder);
    kvant_calibrator *calibrator = calibrator_of(5);
    for (uint32_t l = 0; l < LAYERS; l++)
        add_some(calibrator, all, l);
    save_to(calibrator, f.path);
    size_t n, n_again;
    uint8_t *whole = read_whole(f.path, &n);
    calibrator = calibrator_of(5);
    add_some(calibrator, all, 0);
    for (uint32_t step = 0; step < 3; step++) {
        uint64_t position = 99;
        uint32_t left;
        assert_ok(kvant_calibrator_save(calibrator, 17, 100 + step, part, NULL, 0));
        kvant_calibrator_free(&calibrator);
        calibrator = calibrator_of(5);
        assert_ok(kvant_calibrator_restore(calibrator, 17, part, &position, NULL, 0));
        assert_true(position == 100 + step);
        if (step < 1)
            for (uint32_t l = 1; l < LAYERS; l++)
                add_some(calibrator, all, l);
        else
            assert_int_equal(kvant_calibrator_cluster(calibrator, &left), KVANT_OK);
    }
    save_to(calibrator, f.path);
    uint8_t *again = read_whole(f.path, &n_again);
    assert_int_equal(n, n_again);
    assert_memory_equal(whole, again, n);
    unlink(part);
    drop_file(&f);
    free(whole);
    free(again);
    free(all);
}

static void expect_no_restore(const char *path, const uint8_t *bytes, size_t n, uint64_t key,
                              uint64_t seed, kvant_status expected)
{
    char err[256] = "";
    uint64_t position = 99;
    kvant_calibration *c;
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(bytes, 1, n, out), n);
    fclose(out);
    kvant_calibrator *calibrator = calibrator_of(seed);
    assert_int_equal(kvant_calibrator_restore(calibrator, key, path, &position, err, sizeof err),
                     expected);
    assert_true(position == 99 && err[0]);
    assert_int_equal(kvant_calibrator_finish(calibrator, &c),
                     KVANT_ERR_ARGUMENT); /* the calibrator kept nothing of the refused call */
    kvant_calibrator_free(&calibrator);
}

/* Computes the checksum again, so that the reader gets as far as the fields after it. */
static void sign_bytes(uint8_t *bytes, size_t n)
{
    file f = { .bytes = bytes, .n = n };
    put(&f, 16, n, 8);
    sign(&f);
}

CASE(checkpoints_of_other_work_are_refused)
{
    data *all = make_data();
    file f = make_file();
    size_t n;
    kvant_calibrator *calibrator = calibrator_of(5);
    add_some(calibrator, all, 0);
    assert_int_equal(kvant_calibrator_save(calibrator, 17, 1, f.path, NULL, 0), KVANT_OK);
    uint8_t *bytes = read_whole(f.path, &n), *copy = malloc(n);
    expect_no_restore(f.path, bytes, n, 18, 5, KVANT_ERR_ARGUMENT);
    expect_no_restore(f.path, bytes, n, 17, 6, KVANT_ERR_ARGUMENT);
    expect_no_restore(f.path, f.bytes, f.n, 17, 5, KVANT_ERR_FORMAT); /* a calibration */
    for (size_t cut = 0; cut < n; cut += 1 + cut / 3) {
        expect_no_restore(f.path, bytes, cut, 17, 5, KVANT_ERR_FORMAT);
        memcpy(copy, bytes, n);
        if (cut >= sizeof(uint64_t) * 19 + 256) { /* shorter files have no complete head */
            sign_bytes(copy, cut);
            expect_no_restore(f.path, copy, cut, 17, 5, KVANT_ERR_FORMAT);
        }
        memcpy(copy, bytes, n);
        copy[cut] ^= 4;
        expect_no_restore(f.path, copy, n, 17, 5, KVANT_ERR_FORMAT);
    }
    for (size_t at = sizeof(uint64_t) * 19 + 256; at < sizeof(uint64_t) * 22 + 256;
         at += 8) { /* index, heads, head_dim */
        static const uint64_t lies[] = { 0, 1 << 20, 1ull << 40, UINT64_MAX };
        for (size_t i = at == sizeof(uint64_t) * 19 + 256; i < COUNT(lies); i++) {
            file lying = { .bytes = copy, .n = n };
            memcpy(copy, bytes, n);
            put(&lying, at, lies[i], 8);
            sign_bytes(copy, n);
            expect_no_restore(f.path, copy, n, 17, 5, KVANT_ERR_FORMAT);
        }
    }
    assert_int_equal(kvant_calibrator_restore(calibrator, 17, f.path, &(uint64_t){ 0 }, NULL, 0),
                     KVANT_ERR_ARGUMENT);
    kvant_calibrator_free(&calibrator);
    drop_file(&f);
    free(bytes);
    free(copy);
    free(all);
}

CASE(files_that_cannot_be_used_say_why)
{
    file f = make_file();
    kvant_calibration *c, *good;
    char err[256], path[128];
    assert_int_equal(kvant_calibration_load(f.path, &good, NULL, 0), KVANT_OK);
    snprintf(path, sizeof path, "%s/none", f.folder);
    assert_int_equal(kvant_calibration_load(path, &c, err, sizeof err), KVANT_ERR_IO);
    assert_non_null(strstr(err, path));
    assert_int_equal(kvant_calibration_load(f.folder, &c, err, sizeof err), KVANT_ERR_IO);
    assert_int_equal(kvant_calibration_load(NULL, &c, err, sizeof err), KVANT_ERR_ARGUMENT);
    snprintf(path, sizeof path, "%s/none/file", f.folder);
    assert_int_equal(kvant_calibration_save(good, path, err, sizeof err), KVANT_ERR_IO);
    assert_int_equal(kvant_calibration_save(good, f.folder, err, sizeof err),
                     KVANT_ERR_IO); /* a folder that rename() cannot replace */
    struct stat st;
    assert_int_equal(stat(f.path, &st), 0);
    assert_int_equal(st.st_size, f.n);
    kvant_calibration_free(&good);
    drop_file(&f);
}

RUN_CASES(NULL, NULL)
