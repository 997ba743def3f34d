/* test_transforms_of_rows.c - transforms of centre and scale: from the first rows or from a file,
 * made early or late, robust, replaced by better ones. Each kv head has its own. */
#include "tensor_fixture.h"

#include "../../src/base/alloc.h"
#include "../../src/codec/codec_internal.h"
#include "calibrated.h"

/* The rules of learning.md in double precision. Rows are dealt into 8 parts. A part's mean counts
 * if it lies within the median of the parts' ranges around the median of their means. A part's
 * largest distance counts up to 4 times the median of all parts' distances. */
enum { PARTS = 8 };

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The lower of the two middle numbers. */
static double median_of(const double *x)
{
    double sorted[PARTS];
    memcpy(sorted, x, sizeof sorted);
    qsort(sorted, PARTS, sizeof *sorted, ascending);
    return sorted[PARTS / 2 - 1];
}

/* The robust mean of channel j of n rows; n is at least 16. */
static double robust_mean(const float *rows, uint32_t n, uint32_t j)
{
    double mean[PARTS], range[PARTS], sum = 0;
    for (uint32_t p = 0; p < PARTS; p++) {
        double least = INFINITY, most = -INFINITY, count = 0;
        mean[p] = 0;
        for (uint32_t i = p; i < n; i += PARTS, count++) {
            double x = rows[(size_t)i * WIDTH + j];
            mean[p] += x;
            least = fmin(least, x);
            most = fmax(most, x);
        }
        mean[p] /= count;
        range[p] = most - least;
    }
    double middle = median_of(mean), limit = median_of(range);
    for (uint32_t p = 0; p < PARTS; p++)
        sum += fmin(fmax(mean[p], middle - limit), middle + limit) * ((n + PARTS - 1 - p) / PARTS);
    return sum / n;
}

static double robust_distance(const float *rows, uint32_t n, uint32_t j, double center)
{
    double distance[PARTS] = { 0 }, largest = 0;
    for (uint32_t i = 0; i < n; i++)
        distance[i % PARTS] = fmax(distance[i % PARTS], fabs(rows[(size_t)i * WIDTH + j] - center));
    for (uint32_t p = 0; p < PARTS; p++)
        largest = fmax(largest, fmin(distance[p], 4 * median_of(distance)));
    return largest;
}

/* The block's centre and scale are the robust mean and scale of n rows. Sums of n / 8 numbers in
 * binary32 err by n / 8 units of 2^-24 of the largest number. */
static void check_affine(const fixture *f, uint32_t block, const float *rows, uint32_t n)
{
    for (uint32_t h = 0; h < N_KV_HEADS; h++) {
        kvant_codec_info info = info_of(f->codecs[h]);
        kvant_affine affine = block_of(f, block, h).affine;
        assert_int_equal(affine.center != NULL, info.center != KVANT_CENTER_NONE);
        assert_int_equal(affine.scale != NULL, info.norm != KVANT_NORM_NONE);
        for (uint32_t j = 0; j < HEAD_DIM; j++) {
            double center = 0, largest = 0;
            for (uint32_t i = 0; i < n; i++)
                largest = fmax(largest, fabsf(rows[(size_t)i * WIDTH + h * HEAD_DIM + j]));
            if (affine.center) {
                center = affine.center[j];
                assert_true(fabs(center - robust_mean(rows, n, h * HEAD_DIM + j)) <=
                            (n / 8 + 8) * 0x1p-24 * largest);
            }
            double scale = sqrt(robust_distance(rows, n, h * HEAD_DIM + j,
                                                center)); /* no channel is 2^-16 of another */
            assert_true(!affine.scale || fabs(affine.scale[j] / scale - 1) <= 0x1p-22);
        }
    }
}

static void shift_rows(float *rows, uint32_t n, uint64_t *rng)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < WIDTH; j++)
            rows[(size_t)i * WIDTH + j] =
                (float)(j % 7 * 20) + test_normal(rng) * (j % 5 == 0 ? 10 : 1);
}

CASE(centre_of_the_first_batch)
{
    uint64_t rng = 38;
    fixture f = make("turboquant-4:center=first", 1, 8, 0);
    float rows[300 * WIDTH], again[300 * WIDTH], center[HEAD_DIM];
    shift_rows(rows, 300, &rng);
    assert_null(block_of(&f, 1, 0).affine.center);
    assert_int_equal(tensor_info_of(&f).n_transforms, 1);
    write_rows(&f, 0, 300, rows, 300, 2);
    check_affine(&f, 0, rows, 300);
    check_affine(&f, 4, rows, 300);
    for (uint32_t block = 0; block < 5; block++)
        assert_int_equal(block_of(&f, block, 0).state,
                         block == 0 ? KVANT_BLOCK_SINK : KVANT_BLOCK_SEALED);
    /* Sealed rows have exactly the bytes that the codec writes with this centre. */
    void *page = aligned(info_of(f.codecs[0]).page_bytes);
    const kvant_affine affine = block_of(&f, 1, 0).affine;
    assert_ok(kvant_codec_encode(f.codecs[0], &affine, rows + 64 * WIDTH, WIDTH, 0, 64, page));
    assert_memory_equal(page, block_of(&f, 1, 0).page, info_of(f.codecs[0]).page_bytes);
    free(page);
    /* Rows like the first ones change nothing, in any batches. */
    memcpy(center, affine.center, sizeof center);
    shift_rows(again, 300, &rng);
    write_rows(&f, 300, 200, again, 100, 2);
    write_rows(&f, 0, 300, again, 7, 2);
    assert_int_equal(tensor_info_of(&f).n_transforms, 2);
    assert_memory_equal(block_of(&f, 7, 0).affine.center, center, sizeof center);
    assert_int_equal(kvant_tensor_set_affine(f.tensor, &affine), KVANT_ERR_ARGUMENT);
    /* Rows of another kind get another transform. */
    for (size_t j = 0; j < COUNT(again); j++)
        again[j] = 50 - again[j];
    write_rows(&f, 0, 300, again, 300, 1);
    assert_int_equal(tensor_info_of(&f).n_transforms, 3);
    check_affine(&f, 0, again, 300);
    check_affine(&f, 4, again, 300);
    assert_memory_equal(block_of(&f, 7, 0).affine.center, center,
                        sizeof center); /* no row was written there */
    assert_true(error_of(&f, 0, 300) < 3 &&
                error_of(&f, 320, 180) < 3); /* 10 in the wide channels, with 4 bits */
    kvant_tensor_clear(f.tensor);
    assert_null(block_of(&f, 1, 0).affine.center);
    write_rows(&f, 0, 300, again, 300, 2);
    check_affine(&f, 1, again, 300);
    drop(&f);
}

/* Rows come one at a time. The 64th row makes a transform, and earlier rows keep their values. */
CASE(transform_of_the_first_rows)
{
    static const char *const specs[] = { "turboquant-4:center=first,norm=first",
                                         "int-4:axis=channel,norm=first",
                                         "bdr-4:center=first,recent=70" };
    for (size_t s = 0; s < COUNT(specs); s++) {
        uint64_t rng = 39;
        fixture f = make(specs[s], 2, 7, 0);
        float rows[370 * WIDTH];
        uint32_t first = 7 * 64 + 30; /* in the second sequence, not aligned to a block */
        shift_rows(rows, 370, &rng);
        write_rows(&f, first, 63, rows, 1, 1);
        for (uint32_t block = 7; block < 9; block++) {
            assert_true(is_open(&f, block));
            assert_int_equal(block_of(&f, block, 1).transform_id, 0);
            assert_null(block_of(&f, block, 1).affine.center);
            assert_null(block_of(&f, block, 1).affine.scale);
        }
        assert_true(error_of(&f, first, 63) <=
                    180 * 0x1p-11); /* fp16; a rotation spreads the rows */
        write_rows(&f, first + 63, 1, rows + 63 * WIDTH, 1, 1);
        check_affine(&f, 7, rows, 64);
        check_affine(&f, 8, rows, 64);
        write_rows(&f, first + 64, 306, rows + 64 * WIDTH, 1, 1);
        assert_int_equal(tensor_info_of(&f).n_transforms, 2);
        check_affine(&f, 12, rows, 64);
        /* Channels have variance 1, and a fifth of them variance 100, quantised to 4 bits. Without
         * a centre the numbers' mean square is above 5000. The worst of these codecs has one scale
         * per token. Its 4 bits span +-4 sigma of the wide channels. A step of 80 / 15 makes an
         * error of 2.4. With scales of sqrt(max) the wide channels count sqrt(10) instead. */
        assert_true(error_of(&f, first, 370) < sqrt(2.4));
        drop(&f);
    }
}

/* A constant channel must not make later rows explode. */
CASE(scales_have_a_floor)
{
    fixture f = make("turboquant-4:norm=first", 1, 2, 0);
    float rows[64 * WIDTH] = { 0 };
    for (uint32_t i = 0; i < 64; i++) {
        rows[i * WIDTH + 3] = i / 8 % 2 ? 16 : -16;
        rows[i * WIDTH + 9] = 1e-30f;
    }
    write_rows(&f, 0, 64, rows, 64, 1);
    const float *scale = block_of(&f, 0, 0).affine.scale;
    assert_true(scale[3] == 4 && scale[9] == 4 / 256.0f && scale[0] == 4 / 256.0f);
    for (uint32_t j = 0; j < HEAD_DIM; j++)
        assert_true(block_of(&f, 0, 1).affine.scale[j] == 1); /* a head of zeros */
    drop(&f);
}

/* When pending rows find no exact page, the transform is made at once. */
CASE(small_pools_make_transforms_early)
{
    uint64_t rng = 40;
    fixture f = make("turboquant-4:center=first", 1, 10, 1);
    float rows[5 * WIDTH];
    static const uint32_t slots[5] = { 70, 71, 200, 300, 2 };
    shift_rows(rows, 5, &rng);
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(tensor_info_of(&f).n_transforms,
                         i < 3 ? 1 : 2); /* the third row is seen, then finds no page */
        write_rows(&f, slots[i], 1, rows + i * WIDTH, 1, 1);
    }
    /* with three rows, the centre is their plain mean, without the rules for outliers */
    for (uint32_t j = 0; j < HEAD_DIM; j++) {
        float mean = (rows[j] + rows[WIDTH + j] + rows[2 * WIDTH + j]) / 3;
        assert_true(fabsf(block_of(&f, 3, 0).affine.center[j] - mean) <= 200 * 0x1p-22f);
    }
    for (int i = 0; i < 5; i++)
        /* variance 100 in the wide channels, with 4 bits */
        assert_true(error_of(&f, slots[i], 1) < 5);
    drop(&f);
}

/* An engine saves rows, centre and scale, and restores them into another tensor. The codes are the
 * same again. */
CASE(state_with_centre)
{
    uint64_t rng = 41;
    fixture f = make("int-4:center=first,norm=first,recent=40", 1, 8, 0), g = make_like(&f);
    float rows[400 * WIDTH], saved[400 * WIDTH], restored[400 * WIDTH], center[WIDTH], scale[WIDTH];
    shift_rows(rows, 400, &rng);
    write_rows(&f, 0, 400, rows, 400, 1);
    assert_int_equal(kvant_tensor_read(f.tensor, 0, 400, saved, WIDTH), KVANT_OK);
    for (uint32_t h = 0; h < N_KV_HEADS; h++) {
        memcpy(center + h * HEAD_DIM, block_of(&f, 2, h).affine.center, HEAD_DIM * sizeof *center);
        memcpy(scale + h * HEAD_DIM, block_of(&f, 2, h).affine.scale, HEAD_DIM * sizeof *scale);
    }
    assert_int_equal(kvant_tensor_set_affine(g.tensor, &(kvant_affine){ center, scale }), KVANT_OK);
    write_rows(&g, 0, 400, saved, 50, 1);
    assert_int_equal(tensor_info_of(&g).n_transforms, 2);
    for (uint32_t h = 0; h < N_KV_HEADS; h++)
        assert_memory_equal(block_of(&g, 6, h).affine.center, center + h * HEAD_DIM,
                            HEAD_DIM * sizeof *center);
    assert_int_equal(kvant_tensor_read(g.tensor, 0, 400, restored, WIDTH), KVANT_OK);
    /* A row gets its zero point and scale again, unless binary32's rounding of c + s z moves an
     * fp16 scale over a tie. That changes it by at most 2^-11 of 15 steps. Numbers are at most 120
     * + 50. Exact pages add fp16's 2^-11. */
    for (size_t j = 0; j < COUNT(saved); j++)
        assert_true(fabsf(saved[j] - restored[j]) <= 170 / 1024.0f);
    drop(&g);
    drop(&f);
}

/* A calibrated centre exists from the start and again after clearing. Each head has its own. */
CASE(calibrated_centre_and_scale)
{
    uint64_t rng = 42;
    fixture f = { 0 };
    float rows[100 * WIDTH];
    shift_rows(rows, 100, &rng);
    for (uint32_t h = 0; h < N_KV_HEADS;
         h++) { /* as kvant_codec_create_calibrated does with a calibration */
        kvant_codec *codec = f.owned[h] = make_codec("turboquant-4", HEAD_DIM, KVANT_ROLE_K);
        f.codecs[h] = codec;
        codec->file_center = kvant_alloc(HEAD_DIM, sizeof(float));
        codec->file_scale = kvant_alloc(HEAD_DIM, sizeof(float));
        codec->info.center = KVANT_CENTER_FILE;
        codec->info.norm = KVANT_NORM_FILE;
        for (uint32_t j = 0; j < HEAD_DIM; j++) {
            codec->file_center[j] = (float)((HEAD_DIM * h + j) % 7 * 20);
            codec->file_scale[j] = (HEAD_DIM * h + j) % 5 == 0 ? 10 : 1;
        }
    }
    f.params = (kvant_tensor_params){
        .size = sizeof f.params, .n_kv_heads = N_KV_HEADS, .n_sequences = 1, .n_blocks = 2
    };
    make_tensor(&f);
    for (int lap = 0; lap < 2; lap++) {
        double error = 0;
        for (uint32_t h = 0; h < N_KV_HEADS; h++) {
            kvant_affine affine = block_of(&f, 0, h).affine;
            assert_memory_equal(affine.center, f.owned[h]->file_center, HEAD_DIM * sizeof(float));
            assert_memory_equal(affine.scale, f.owned[h]->file_scale, HEAD_DIM * sizeof(float));
        }
        write_rows(&f, 0, 100, rows, 100, 1);
        for (uint32_t i = 0; i < 100; i++) {
            float got[WIDTH];
            read_slot(&f, i, got);
            for (uint32_t j = 0; j < WIDTH; j++)
                error +=
                    pow((got[j] - rows[i * WIDTH + j]) / (j % 5 == 0 ? 10 : 1), 2) / (100 * WIDTH);
        }
        assert_true(error < 0.05); /* the codec sees variance 1 */
        kvant_tensor_clear(f.tensor);
    }
    kvant_free(f.owned[1]->file_scale);
    f.owned[1]->file_scale = NULL;
    kvant_tensor_params params = params_of(&f);
    kvant_tensor *tensor;
    assert_int_equal(kvant_tensor_create(&params, f.memory, &tensor), KVANT_ERR_UNSUPPORTED);
    assert_null(tensor);
    drop(&f);
}

/* With too few rows to choose a transform, a new block takes the transform of its sequence's last
 * block before the write. If the last chosen rows did not fit a block's transform, the block takes
 * their transform with its first new row. A block that nobody writes to keeps its own. */
CASE(new_blocks_follow_their_sequence)
{
    uint64_t rng = 43;
    fixture f = make("turboquant-4:center=first,sink=0", 2, 8, 0);
    static float rows[128 * WIDTH];
    static const int64_t slots[] = { 64 + 3, 4 * 64, 64 + 5, 8 * 64 + 1, 5 * 64 + 7, 0 };
    shift_rows(rows, 128, &rng);
    write_rows(&f, 0, 128, rows, 128, 1);
    for (size_t j = 0; j < COUNT(rows); j++)
        rows[j] = 50 - rows[j];
    write_rows(&f, 128, 128, rows, 128, 1);
    const uint32_t first = block_of(&f, 1, 0).transform_id,
                   second = block_of(&f, 3, 0).transform_id;
    assert_int_not_equal(first, second);
    assert_int_equal(kvant_tensor_write(f.tensor, slots, COUNT(slots), rows, WIDTH, 1), KVANT_OK);
    assert_int_equal(block_of(&f, 1, 0).transform_id, second);
    assert_int_equal(block_of(&f, 4, 0).transform_id, second);
    assert_int_equal(block_of(&f, 5, 0).transform_id, second);
    assert_int_equal(block_of(&f, 0, 0).transform_id, second);
    write_rows(&f, 0, 64, rows, 64, 1); /* chosen: fits the second */
    assert_ok(kvant_tensor_write(f.tensor, &(int64_t){ 6 * 64 }, 1, rows, WIDTH, 1));
    assert_int_equal(block_of(&f, 6, 0).transform_id, second);
    assert_int_equal(block_of(&f, 2, 0).transform_id, second);
    drop(&f);
}

/* Rows with the distribution of the calibration's rows, and with wide channels added. */
static void calibrated_rows(float *rows, uint32_t n, uint64_t *rng)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < WIDTH; j++)
            rows[i * WIDTH + j] = test_normal(rng) * (j % 9 == 0 ? 5 : 0.6f) +
                                  (float)((i % 5 * 7 + j) % 11) -
                                  (j % HEAD_DIM == 3 ? 40.0f : 0.0f);
}

/* One kv head has a calibrated centre and the next has none. Each is stored as in a tensor with
 * this head alone. */
CASE(centre_lost)
{
    static const char *const specs[N_KV_HEADS] = {
        "turboquant-4:norm=first,sink=4", /* the spec of heads with calibrated centres */
        "turboquant-4:center=file,norm=first"
    };
    kvant_calibration *c = calibrate_fixed(HEAD_DIM);
    assert_non_null(c);
    for (uint32_t order = 0; order < 2; order++)
        for (uint32_t batch = 1; batch <= 200; batch += 199) {
            uint64_t rng = 45;
            float rows[200 * WIDTH], got[WIDTH], alone[HEAD_DIM];
            fixture f = { 0 };
            for (uint32_t h = 0; h < N_KV_HEADS; h++) {
                assert_ok(kvant_codec_create_calibrated(specs[(h + order) % 2], HEAD_DIM,
                                                        KVANT_ROLE_K, TEST_SEED, c, 0, h,
                                                        &f.owned[h], NULL, 0));
                f.codecs[h] = f.owned[h];
            }
            f.params = (kvant_tensor_params){
                .size = sizeof f.params, .n_kv_heads = N_KV_HEADS, .n_sequences = 1, .n_blocks = 4
            };
            make_tensor(&f);
            calibrated_rows(rows, 200, &rng);
            write_rows(&f, 0, 200, rows, batch, 2);
            for (uint32_t h = 0; h < N_KV_HEADS; h++) {
                kvant_calibration_entry entry = { .size = sizeof entry };
                fixture g = { .codecs = { f.codecs[h] }, .params = f.params };
                g.params.n_kv_heads = 1;
                make_tensor(&g);
                for (uint32_t i = 0; i < 200; i += batch) {
                    int64_t slots[200];
                    for (uint32_t k = 0; k < batch; k++)
                        slots[k] = i + k;
                    assert_ok(kvant_tensor_write(g.tensor, slots, batch,
                                                 rows + i * WIDTH + h * HEAD_DIM, WIDTH, 1));
                }
                double error = 0;
                for (uint32_t i = 0; i < 200; i++) {
                    read_slot(&f, i, got);
                    assert_int_equal(kvant_tensor_read(g.tensor, i, 1, alone, 0), KVANT_OK);
                    assert_memory_equal(got + h * HEAD_DIM, alone, sizeof alone);
                    error += squared_distance(got + h * HEAD_DIM, rows + i * WIDTH + h * HEAD_DIM,
                                              HEAD_DIM) /
                             6400;
                }
                /* 4 bits, for rows with a channel of -40 and rows without it. A lost centre doubles
                 * the error. */
                assert_true(sqrt(error) < ((h + order) % 2 ? 0.35 : 0.7));
                assert_ok(kvant_calibration_get_entry(c, 0, h, KVANT_ROLE_K, &entry));
                kvant_affine affine = block_of(&f, 2, h).affine;
                assert_non_null(affine.scale);
                assert_int_equal(affine.center != NULL, (h + order) % 2);
                if (affine.center)
                    assert_memory_equal(affine.center, entry.mean, HEAD_DIM * sizeof(float));
                drop(&g);
            }
            drop(&f);
        }
    kvant_calibration_free(&c);
}

RUN_CASES(NULL, NULL)
