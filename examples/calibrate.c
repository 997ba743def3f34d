/* A calibration: statistics of a model's rows are gathered, saved, and used by a codec.
 *
 *     cc calibrate.c $(pkg-config --cflags --libs kvant) -lm -o calibrate && ./calibrate FOLDER
 *
 * `kvant calibrate` does this for a model that llama.cpp runs. */
#include <kvant/calibration.h>

#include "example.h"

enum { KV_HEADS = 2, DIM = 64, ROW = KV_HEADS * DIM, TOKENS = 256, QUERIES = 4 };
enum { KEY = 1 }; /* of the text, so that a restored state is of the same text */

static kvant_calibrator *make_calibrator(const char *model)
{
    static const uint32_t clusters[] = { 16 }; /* centroids for kmeans */
    const kvant_calibrator_config config = { .size = sizeof config,
                                             .model = "example",
                                             .model_fingerprint = kvant_model_fingerprint(model),
                                             .clusters = clusters,
                                             .n_codebooks = 1,
                                             .n_threads = 2 };
    kvant_calibrator *calibrator;
    check(kvant_calibrator_create(&config, &calibrator, NULL, 0));
    return calibrator;
}

/* Rows and queries of layer 0, as an engine caches them. */
static void add_text(kvant_calibrator *calibrator)
{
    float *k = random_numbers(TOKENS * ROW), *v = random_numbers(TOKENS * ROW);
    float *q = random_numbers(TOKENS * DIM);
    check(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_K, KV_HEADS, DIM, k, ROW, TOKENS));
    check(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_V, KV_HEADS, DIM, v, ROW, TOKENS));
    for (uint32_t h = 0; h < KV_HEADS; h++) {
        check(kvant_calibrator_add_queries(calibrator, 0, h, DIM, q, DIM, TOKENS));
        /* Which keys the last queries look at; the first 64 keys stay fp16 and count 0. */
        const kvant_calibrator_attention seen = { .size = sizeof seen,
                                                  .keys = k + h * DIM,
                                                  .key_stride = ROW,
                                                  .n_keys = TOKENS,
                                                  .queries = q + (TOKENS - QUERIES) * DIM,
                                                  .query_stride = DIM,
                                                  .n_queries = QUERIES,
                                                  .scale = 0.125f };
        check(kvant_calibrator_add_attention(calibrator, 0, h, DIM, 64, &seen));
    }
    free(k), free(v), free(q);
}

/* The values of layer 1, whose sums a GPU has made. */
static void add_sums(kvant_calibrator *calibrator)
{
    float *rows = random_numbers(TOKENS * ROW), low[ROW], high[ROW];
    double sum[ROW] = { 0 };
    for (int c = 0; c < ROW; c++) {
        low[c] = high[c] = rows[c];
        for (int t = 0; t < TOKENS; t++) {
            const float x = rows[t * ROW + c];
            sum[c] += x, low[c] = x < low[c] ? x : low[c], high[c] = x > high[c] ? x : high[c];
        }
    }
    const kvant_calibrator_moments sums = { .size = sizeof sums,
                                            .n_kv_heads = KV_HEADS,
                                            .head_dim = DIM,
                                            .n_rows = TOKENS,
                                            .sum = sum,
                                            .min = low,
                                            .max = high,
                                            .rows = rows,
                                            .stride = ROW };
    check(kvant_calibrator_add_moments(calibrator, 1, KVANT_ROLE_V, &sums));
    free(rows);
}

/* The state goes to a file after a part of the text, and a new calibrator goes on from there. */
static kvant_calibrator *resume(kvant_calibrator *calibrator, const char *program, const char *path)
{
    uint64_t position;
    check(kvant_calibrator_save(calibrator, KEY, TOKENS, path, NULL, 0));
    kvant_calibrator_free(&calibrator);
    calibrator = make_calibrator(program);
    check(kvant_calibrator_restore(calibrator, KEY, path, &position, NULL, 0));
    return position == TOKENS ? calibrator : NULL;
}

static void print_calibration(const kvant_calibration *calibration)
{
    kvant_calibration_info info = { .size = sizeof info };
    kvant_calibration_entry entry = { .size = sizeof entry };
    kvant_codec *codec;
    check(kvant_calibration_get_info(calibration, &info));
    check(kvant_calibration_get_entry(calibration, 0, 1, KVANT_ROLE_K, &entry));
    check(kvant_codec_create_calibrated("int-4:center=file", DIM, KVANT_ROLE_K, 0, calibration, 0,
                                        1, &codec, NULL, 0));
    printf("%u layers, %u kv heads of %u, %llu tokens, %zu bytes, mean[0] %.3f\n",
           (unsigned)info.n_layers, (unsigned)info.n_kv_heads, (unsigned)info.head_dim,
           (unsigned long long)info.n_tokens, info.bytes, entry.mean[0]);
    kvant_codec_free(&codec);
}

int main(int argc, char **argv)
{
    char state[512], file[512];
    const char *folder = argc > 1 ? argv[1] : ".";
    snprintf(state, sizeof state, "%s/example.state", folder);
    snprintf(file, sizeof file, "%s/example.kvcal", folder);

    kvant_calibrator *calibrator = make_calibrator(argv[0]);
    add_text(calibrator);
    add_sums(calibrator);
    calibrator = resume(calibrator, argv[0], state);
    for (uint32_t left = 1; left > 0;) /* the long part; a program may tell how many are left */
        check(kvant_calibrator_cluster(calibrator, &left));
    kvant_calibration *calibration;
    check(kvant_calibrator_finish(calibrator, &calibration));
    check(kvant_calibration_save(calibration, file, NULL, 0));
    kvant_calibrator_free(&calibrator);
    kvant_calibration_free(&calibration);

    check(kvant_calibration_load(file, &calibration, NULL, 0));
    print_calibration(calibration);
    kvant_calibration_free(&calibration);
    return remove(state) != 0 || remove(file) != 0;
}
