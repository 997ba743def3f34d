/* Rows to page bytes and back, and attention on the bytes of one page.
 *
 *     cc codec.c $(pkg-config --cflags --libs kvant) -lm -o codec && ./codec
 */
#include <kvant/codec.h>

#include <math.h>

#include "example.h"

enum { DIM = 64 };

/* Prints the version, the CPU level and all families of codecs. */
static void print_machine(void)
{
    kvant_cpu_level level;
    check(kvant_cpu_level_from_name("c", &level)); /* portable C, which every machine has */
    check(kvant_set_cpu_level(level));
    check(kvant_set_cpu_level(KVANT_CPU_AUTO)); /* the best one again */
    printf("kvant %s, %s, %u CPUs\n", kvant_version(), kvant_cpu_level_name(kvant_get_cpu_level()),
           (unsigned)kvant_available_cpus());
    for (size_t i = 0; i < kvant_codec_family_count(); i++) {
        kvant_codec_family family = { .size = sizeof family };
        check(kvant_codec_family_get(i, &family));
        printf("%-12s %s\n", family.name, family.summary);
    }
}

/* Checks a spec that a user typed, before a model is known. */
static void check_spec(const char *spec)
{
    char reason[256];
    int needed;
    if (kvant_codec_check(spec, KVANT_ROLE_K, NULL, reason, sizeof reason) != KVANT_OK)
        printf("%s: %s\n", spec, reason);
    else {
        check(kvant_codec_needs_calibration(spec, KVANT_ROLE_K, &needed, reason, sizeof reason));
        printf("%s: %s\n", spec, needed ? "needs a calibration" : "needs no calibration");
    }
}

static kvant_codec *make_codec(const char *spec, kvant_role role)
{
    char reason[256];
    kvant_codec *codec;
    if (kvant_codec_create(spec, DIM, role, 0, &codec, reason, sizeof reason) == KVANT_OK)
        return codec;
    fprintf(stderr, "%s\n", reason);
    exit(1);
}

int main(void)
{
    print_machine();
    check_spec("turboquant-4");
    check_spec("turboquant-4:center=file");
    check_spec("turboquant-9");

    kvant_codec *k = make_codec("turboquant-4", KVANT_ROLE_K);
    kvant_codec *v = make_codec("turboquant-4", KVANT_ROLE_V);
    kvant_codec_info info = { .size = sizeof info };
    check(kvant_codec_get_info(k, &info));
    void *k_page = zeroed(info.page_bytes), *v_page = zeroed(info.page_bytes);
    float *rows = random_numbers(KVANT_PAGE_TOKENS * DIM), decoded[KVANT_PAGE_TOKENS * DIM];
    check(kvant_codec_encode(k, NULL, rows, DIM, 0, KVANT_PAGE_TOKENS, k_page));
    check(kvant_codec_encode(v, NULL, rows, DIM, 0, KVANT_PAGE_TOKENS, v_page));
    check(kvant_codec_decode(k, NULL, k_page, 0, KVANT_PAGE_TOKENS, decoded, DIM));

    /* One query over the 64 tokens of the page. */
    float *q = random_numbers(DIM), weights[KVANT_PAGE_TOKENS], out[DIM] = { 0 }, sum = 0;
    check(kvant_codec_transform_query(k, NULL, q, q));
    check(kvant_codec_score(k, k_page, q, DIM, 1, weights));
    for (int t = 0; t < (int)KVANT_PAGE_TOKENS; t++)
        sum += weights[t] = expf(weights[t] / sqrtf(DIM));
    check(kvant_codec_accumulate(v, v_page, weights, 1, out, DIM));
    check(kvant_codec_transform_output(v, NULL, sum, out, out));

    double error = 0, energy = 0;
    for (int i = 0; i < (int)KVANT_PAGE_TOKENS * DIM; i++) {
        error += pow(decoded[i] - rows[i], 2);
        energy += pow(rows[i], 2);
    }
    printf("%s: %.2f bits per number, squared error %.4f, out[0] %.3f\n", info.spec, info.true_bits,
           error / energy, out[0] / sum);
    kvant_codec_free(&k);
    kvant_codec_free(&v);
    free(k_page), free(v_page), free(rows), free(q);
    return 0;
}
