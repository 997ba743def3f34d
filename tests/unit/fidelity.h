/* fidelity.h - the three measures that OCTOPUS and PolarQuant report, on normally distributed keys
 * and queries. */
#ifndef KVANT_TESTS_FIDELITY_H
#define KVANT_TESTS_FIDELITY_H

#include "testing.h"

/* Means of the cosine, the squared error per number, and an inner product's absolute error. */
typedef struct fidelity {
    double cosine, mse, product;
} fidelity;

/* Keys and queries of normal numbers, 16 queries for each page of keys: the set-up of OCTOPUS,
 * Table 1. */
static inline fidelity measure_fidelity(const char *spec, uint32_t d, uint32_t n_pages,
                                        uint64_t rng)
{
    kvant_codec *codec = make_codec(spec, d, KVANT_ROLE_K);
    void *page = aligned(info_of(codec).page_bytes);
    float *x = malloc((size_t)64 * d * sizeof *x),
          *decoded = malloc((size_t)64 * d * sizeof *decoded);
    float *q = malloc((size_t)16 * d * sizeof *q);
    fidelity sum = { 0, 0, 0 };
    for (uint32_t i = 0; i < n_pages; i++) {
        fill_normal(x, (size_t)64 * d, &rng);
        fill_normal(q, (size_t)16 * d, &rng);
        assert_int_equal(kvant_codec_encode(codec, NULL, x, d, 0, 64, page), KVANT_OK);
        assert_int_equal(kvant_codec_decode(codec, NULL, page, 0, 64, decoded, d), KVANT_OK);
        for (uint32_t t = 0; t < 64; t++) {
            const float *a = x + t * d, *b = decoded + t * d;
            double aa = 0, bb = 0, ab = 0;
            for (uint32_t j = 0; j < d; j++) {
                aa += (double)a[j] * a[j];
                bb += (double)b[j] * b[j];
                ab += (double)a[j] * b[j];
            }
            sum.cosine += ab / sqrt(aa * bb);
            sum.mse += squared_distance(a, b, d) / d;
            for (uint32_t k = 0; k < 16; k++) {
                double error = 0;
                for (uint32_t j = 0; j < d; j++)
                    error += (double)q[k * d + j] * ((double)a[j] - b[j]);
                sum.product += fabs(error) / 16;
            }
        }
    }
    double n = 64.0 * n_pages;
    free(x);
    free(decoded);
    free(q);
    free(page);
    kvant_codec_free(&codec);
    return (fidelity){ sum.cosine / n, sum.mse / n, sum.product / n };
}

#endif
