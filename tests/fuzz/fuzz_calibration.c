/* fuzz_calibration.c - any bytes as a calibration file: it is refused with a message or it is
 * usable, and no read leaves it. For libFuzzer (clang -fsanitize=fuzzer). With KVANT_FUZZ_SMOKE it
 * is a program that mutates a valid file itself, a fixed number of times.
 *
 * The checksum would refuse nearly every mutation at once. So the program corrects it first, and
 * tests the code after it. */
#include <kvant/calibration.h>

#include <stdint.h>
#include <string.h>

#include "../../src/base/alloc.h"
#include "../../src/calibration/format.h"
#include "../unit/calibrated.h"

/* A matrix of any numbers has an inverse or is refused. Only small matrices are tried, to save
 * time. */
static void create_codec(const kvant_calibration *c, uint32_t layer, uint32_t kv_head,
                         uint32_t head_dim)
{
    kvant_codec *codec;
    char err[256] = "";
    if (head_dim > 16)
        return;
    if (kvant_codec_create_calibrated("int-4:transform=file", head_dim, KVANT_ROLE_K, 0, c, layer,
                                      kv_head, &codec, err, sizeof err) != KVANT_OK &&
        !err[0])
        abort();
    kvant_codec_free(&codec);
}

/* Reads everything in the calibration, so that a sanitiser sees pointers that lead outside. */
static float touch(const kvant_calibration *c)
{
    kvant_calibration_info info = { .size = sizeof info };
    kvant_calibration_entry e = { .size = sizeof e };
    float sum = 0;
    if (kvant_calibration_get_info(c, &info) != KVANT_OK)
        abort();
    for (uint32_t layer = 0; layer < info.n_layers; layer++)
        for (uint32_t i = 0; i < 2 * info.n_kv_heads; i++) {
            if (kvant_calibration_get_entry(c, layer, i / 2, (kvant_role)(i % 2), &e) != KVANT_OK)
                continue;
            sum += e.mean[0] + e.min[e.head_dim - 1] + e.max[e.head_dim - 1];
            sum += e.query_moment ? e.query_moment[e.head_dim * e.head_dim - 1] : 0;
            sum += e.diagonal ? e.diagonal[e.head_dim - 1] : 0;
            sum += e.matrix ? e.matrix[e.head_dim * (e.head_dim + 1) / 2 - 1] : 0;
            create_codec(c, layer, i / 2, e.head_dim);
            for (uint32_t b = 0; b < info.n_codebooks; b++)
                sum += e.centroids[b][(size_t)info.clusters[b] * e.head_dim - 1];
        }
    return sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n); /* libFuzzer's name */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char err[256] = "";
    kvant_error error = { err, sizeof err };
    kvant_calibration *calibration;
    uint8_t *bytes = kvant_alloc(n, 1);
    volatile float sink = 0;
    if (!bytes)
        return 0;
    memcpy(bytes, data, n);
    kvant_calibration_header *header = (kvant_calibration_header *)(void *)bytes;
    if (n >= sizeof *header) {
        header->bytes = n;
        header->checksum = kvant_calibration_checksum(bytes, n);
    }
    if (kvant_calibration_parse(bytes, n, &calibration, &error) == KVANT_OK) {
        sink += touch(calibration);
        (void)sink;
        kvant_calibration_free(&calibration);
        return 0;
    }
    if (calibration || !err[0])
        abort();
    kvant_free(bytes);
    return 0;
}

#ifdef KVANT_FUZZ_SMOKE
#include <stdio.h>

#include "mutate.h"

#define ROUNDS 20000u

int main(void)
{
    kvant_calibration *valid = calibrate_fixed(8);
    uint64_t state = FUZZ_SEED;
    uint8_t *bytes = valid ? malloc(valid->info.bytes) : NULL;
    if (!bytes)
        return 1;
    for (uint32_t i = 0; i < ROUNDS; i++) {
        size_t n = valid->info.bytes;
        memcpy(bytes, valid->bytes, n);
        fuzz_mutate(bytes, &n, 320, 8,
                    &state); /* mostly the head and the table, which contain lengths */
        LLVMFuzzerTestOneInput(bytes, n);
    }
    printf("%u mutated files: none read beyond its end\n", ROUNDS);
    free(bytes);
    kvant_calibration_free(&valid);
    return 0;
}
#endif
