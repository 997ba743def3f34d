/* distortion.h - how far decoded rows and their inner products are from the originals, on normally
 * distributed rows. */
#ifndef KVANT_TESTS_DISTORTION_H
#define KVANT_TESTS_DISTORTION_H

#include "testing.h"

typedef struct distortion {
    double mse;       /* |x - x'|^2 / |x|^2, mean over vectors */
    double mse_error; /* its standard error */
    double slope;     /* regression of <y, x'> on <y, x> */
    double product;   /* sqrt(d) x root mean squared error of <y, x'> for unit x and y */
} distortion;

static inline distortion measure(const char *spec, uint32_t d, uint32_t n_pages)
{
    uint64_t rng = 12345;
    kvant_codec *codec = make_codec(spec, d, KVANT_ROLE_K);
    void *page = aligned(info_of(codec).page_bytes);
    float *x = malloc((size_t)64 * d * sizeof *x),
          *decoded = malloc((size_t)64 * d * sizeof *decoded);
    float *y = malloc(d * sizeof *y);
    double sum = 0, squares = 0, cross = 0, base = 0, error = 0, n = 64.0 * n_pages;
    for (uint32_t i = 0; i < n_pages; i++) {
        fill_normal(x, (size_t)64 * d, &rng);
        assert_int_equal(kvant_codec_encode(codec, NULL, x, d, 0, 64, page), KVANT_OK);
        assert_int_equal(kvant_codec_decode(codec, NULL, page, 0, 64, decoded, d), KVANT_OK);
        for (uint32_t t = 0; t < 64; t++) {
            double norm = 0, y_norm = 0, exact = 0, got = 0;
            fill_normal(y, d, &rng);
            for (uint32_t j = 0; j < d; j++) {
                norm += (double)x[t * d + j] * x[t * d + j];
                y_norm += (double)y[j] * y[j];
                exact += (double)y[j] * x[t * d + j];
                got += (double)y[j] * decoded[t * d + j];
            }
            double relative = squared_distance(x + t * d, decoded + t * d, d) / norm;
            sum += relative;
            squares += relative * relative;
            cross += exact * got / (norm * y_norm);
            base += exact * exact / (norm * y_norm);
            error += (got - exact) * (got - exact) / (norm * y_norm);
        }
    }
    distortion result = { .mse = sum / n, .slope = cross / base, .product = sqrt(d * error / n) };
    result.mse_error = sqrt((squares / n - result.mse * result.mse) / n);
    free(x);
    free(decoded);
    free(y);
    free(page);
    kvant_codec_free(&codec);
    return result;
}

#endif
