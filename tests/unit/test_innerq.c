/* test_innerq.c - InnerQ and KIVI: which groups and modes their names mean, the sizes of InnerQ's
 * Table 3, and the choice that hybrid groups make. Distortion is compared with integrals over the
 * distribution of a group's range. */
#include "testing.h"

#include "../../src/base/half.h"

/* --- pages --- */

typedef struct page {
    kvant_codec *codec;
    kvant_codec_info info;
    void *bytes;
} page;

static page encode(const char *spec, uint32_t d, kvant_role role, const float *x)
{
    page p = { .codec = make_codec(spec, d, role) };
    p.info = info_of(p.codec);
    p.bytes = aligned(p.info.page_bytes);
    assert_int_equal(kvant_codec_encode(p.codec, NULL, x, d, 0, 64, p.bytes), KVANT_OK);
    return p;
}

static void free_page(page *p)
{
    kvant_codec_free(&p->codec);
    free(p->bytes);
}

/* --- The meaning of the names --- */

/* InnerQ's Table 3: the bits of a key's number and of a value's number, averaged. At head_dim 128
 * no page has padding, so the true bits are equal to the table. */
CASE(bits_are_those_of_table_3)
{
    static const struct {
        const char *spec;
        double key, value, mean;
    } rows[] = {
        { "innerq-base", 3.5, 3.5, 3.5 },  { "innerq-hybrid", 3.5, 3.0, 3.25 },
        { "innerq-small", 3.5, 2.5, 3.0 }, { "innerq-base:group=64", 3.25, 3.25, 3.25 },
        { "kivi-2", 3.0, 3.0, 3.0 },       { "kivi-4", 5.0, 5.0, 5.0 },
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        kvant_codec *k = make_codec(rows[i].spec, 128, KVANT_ROLE_K),
                    *v = make_codec(rows[i].spec, 128, KVANT_ROLE_V);
        assert_true(info_of(k).nominal_bits == rows[i].key &&
                    info_of(v).nominal_bits == rows[i].value);
        assert_true(info_of(k).true_bits == rows[i].key && info_of(v).true_bits == rows[i].value);
        assert_true((info_of(k).nominal_bits + info_of(v).nominal_bits) / 2 == rows[i].mean);
        kvant_codec_free(&k);
        kvant_codec_free(&v);
    }
}

/* Section 5.1: windows of 128 tokens in all. InnerQ gives 32 of them to the first tokens. Only keys
 * are normalised. */
CASE(windows_and_normalisation_are_asked_for)
{
    for (int role = 0; role < 2; role++) {
        kvant_codec *innerq = make_codec("innerq-hybrid", 64, (kvant_role)role);
        kvant_codec *kivi = make_codec("kivi-2", 64, (kvant_role)role);
        kvant_codec_info a = info_of(innerq), b = info_of(kivi);
        assert_true(a.sink_tokens == 32 && a.recent_tokens == 96);
        assert_int_equal(a.norm, role == KVANT_ROLE_K ? KVANT_NORM_FIRST : KVANT_NORM_NONE);
        assert_true(b.sink_tokens == 0 && b.recent_tokens == 128 && b.norm == KVANT_NORM_NONE);
        assert_int_equal(a.block_tokens, role == KVANT_ROLE_K ? 1 : 32);
        assert_int_equal(b.block_tokens, role == KVANT_ROLE_K ? 32 : 1);
        kvant_codec_free(&innerq);
        kvant_codec_free(&kivi);
    }
}

/* Sections 4.4 and 5: each name is a uniform codec. */
CASE(names_stand_for_uniform_codecs)
{
    static const struct {
        const char *name, *key, *value;
    } rows[] = {
        { "innerq-base", "int-3:group=32,sym", "int-3:group=32,sym,axis=channel" },
        { "innerq-hybrid", "int-3:group=32,sym", "int-2:group=32,hybrid,axis=channel" },
        { "innerq-hybrid:hybrid=code", "int-3:group=32,sym",
          "int-2:group=32,hybrid=code,axis=channel" },
        { "innerq-small:group=16", "int-3:group=16,sym", "int-2:group=16,sym,axis=channel" },
        { "kivi-2", "int-2:axis=channel,group=32", "int-2:group=32" },
        { "kivi-4:group=64", "int-4:axis=channel,group=64", "int-4:group=64" },
    };
    uint64_t rng = 31;
    float x[64 * 80];
    fill_normal(x, COUNT(x), &rng);
    for (size_t i = 0; i < COUNT(rows); i++)
        for (int role = 0; role < 2; role++) {
            page named = encode(rows[i].name, 80, (kvant_role)role, x);
            page plain = encode(role ? rows[i].value : rows[i].key, 80, (kvant_role)role, x);
            assert_int_equal(named.info.page_bytes, plain.info.page_bytes);
            assert_memory_equal(named.bytes, plain.bytes, named.info.page_bytes);
            free_page(&named);
            free_page(&plain);
        }
}

/* The last group of a token may be smaller. It is quantised like a row of that length. */
CASE(last_groups_may_be_smaller)
{
    static const struct {
        uint32_t d, rest;
        const char *spec, *alone;
    } rows[] = { { 40, 8, "int-4:group=32", "int-4" },
                 { 112, 16, "int-3:group=32,sym", "int-3:sym" },
                 { 80, 16, "int-2:group=32,hybrid", "int-2:hybrid" },
                 { 63, 15, "int-4:group=24", "int-4" } };
    uint64_t rng = 32;
    for (size_t i = 0; i < COUNT(rows); i++)
        for (int role = 0; role < 2; role++) {
            uint32_t d = rows[i].d, rest = rows[i].rest;
            float x[64 * 112], tail[64 * 16], decoded[64 * 112], tail_decoded[64 * 16];
            fill_normal(x, (size_t)64 * d, &rng);
            for (uint32_t t = 0; t < 64; t++)
                memcpy(tail + t * rest, x + (t + 1) * d - rest, rest * sizeof *x);
            encode_decode(rows[i].spec, d, (kvant_role)role, x, decoded);
            encode_decode(rows[i].alone, rest, (kvant_role)role, tail, tail_decoded);
            for (uint32_t t = 0; t < 64; t++)
                assert_memory_equal(decoded + (t + 1) * d - rest, tail_decoded + t * rest,
                                    rest * sizeof *x);
        }
    kvant_codec *whole = make_codec("int-4:group=128", 80, KVANT_ROLE_K);
    assert_string_equal(info_of(whole).spec, "int-4:group=80,asym,axis=token,rotate=none");
    kvant_codec_free(&whole);
}

static void refused(const char *spec, const char *wanted)
{
    kvant_codec *codec;
    char err[256] = "";
    assert_int_equal(kvant_codec_create(spec, 64, KVANT_ROLE_V, 0, &codec, err, sizeof err),
                     KVANT_ERR_SPEC);
    if (!strstr(err, wanted))
        fail_msg("%s: '%s' does not say '%s'", spec, err, wanted);
}

CASE(bad_specs_name_the_valid_values)
{
    refused("innerq", "innerq-base, innerq-hybrid or innerq-small");
    refused("innerq-3", "innerq-base, innerq-hybrid or innerq-small");
    refused("innerq-base:hybrid", "no option 'hybrid'");
    refused("innerq-hybrid:hybrid=best", "paper, code");
    refused("innerq-base:group=48", "16, 32, 64");
    refused("kivi", "2 to 8 bits");
    refused("kivi-2:sym", "no option 'sym'");
    refused("int-3:hybrid,sym", "exclude each other");
    refused("int-3:hybrid=", "option");
}

/* --- distortion of normal numbers --- */

static double density(double x)
{
    return exp(-x * x / 2) / 2.5066282746310002;
}

static double below(double x)
{
    return erfc(-x / sqrt(2)) / 2;
}

/* Integral of (x - level)^2 under the normal density from a to b. */
static double cell(double a, double b, double level)
{
    return (1 + level * level) * (below(b) - below(a)) + (a - 2 * level) * density(a) -
           (b - 2 * level) * density(b);
}

/* Integral of the squared error for numbers between low and high, with equally spaced levels from
 * low to high. */
static double lattice(double low, double high, uint32_t n_levels)
{
    double step = (high - low) / (n_levels - 1), sum = 0;
    for (uint32_t k = 0; k < n_levels; k++) {
        double level = low + k * step;
        sum += cell(k ? level - step / 2 : low, k + 1 < n_levels ? level + step / 2 : high, level);
    }
    return sum;
}

/* Mean squared error per number in a symmetric group of n, relative to variance 1. The largest
 * magnitude m has density 2 n f(m) P(m)^(n-1) with P(m) = P(|x| < m), and has no error. The
 * remaining numbers are normal numbers cut off at +-m. */
static double symmetric_mse(uint32_t n, uint32_t bits)
{
    const double step = 0.001;
    double sum = 0;
    for (double m = step / 2; m < 8; m += step) {
        double inside = below(m) - below(-m);
        sum += step * 2 * n * density(m) * pow(inside, n - 2.0) * lattice(-m, m, (1u << bits) - 1);
    }
    return sum * (n - 1) / n;
}

/* An asymmetric group: its smallest number a and largest number b have density n (n-1) f(a) f(b)
 * P(a < x < b)^(n-2). */
static double asymmetric_mse(uint32_t n, uint32_t bits)
{
    const double step = 0.02;
    double sum = 0;
    for (double a = -7 + step / 2; a < 4; a += step)
        for (double b = a + step; b < 7; b += step) {
            double inside = below(b) - below(a);
            sum += step * step * n * (n - 1.0) * density(a) * density(b) * pow(inside, n - 3.0) *
                   lattice(a, b, 1u << bits);
        }
    return sum * (n - 2) / n;
}

/* Mean squared error per number, over pages of normal numbers, and its standard error over
 * pages. */
static void measure(const char *spec, kvant_role role, double *mse, double *error)
{
    enum { PAGES = 120, D = 64 };
    static float x[64 * D], decoded[64 * D];
    uint64_t rng = 33;
    double sum = 0, squares = 0;
    for (uint32_t i = 0; i < PAGES; i++) {
        fill_normal(x, COUNT(x), &rng);
        encode_decode(spec, D, role, x, decoded);
        double page_mse = squared_distance(x, decoded, COUNT(x)) / COUNT(x);
        sum += page_mse;
        squares += page_mse * page_mse;
    }
    *mse = sum / PAGES;
    *error = sqrt((squares / PAGES - *mse * *mse) / PAGES);
}

/* Three standard errors, plus the rounding of scale and zero point to fp16. A decoded number has a
 * root mean square of at most 1. It moves by at most 2^-11 of itself and of its zero point (below 4
 * sigma), which changes a mean square m by 2 sqrt(m) times that. */
CASE(mse_is_that_of_the_ranges_of_normal_groups)
{
    static const struct {
        const char *spec;
        uint32_t group, bits;
        bool symmetric;
    } rows[] = {
        { "int-3:sym,group=32", 32, 3, true },
        { "int-3:sym,group=32,axis=channel", 32, 3, true },
        { "int-2:sym,group=32,axis=channel", 32, 2, true },
        { "int-2:sym,group=16,axis=channel", 16, 2, true },
        { "int-2:group=32", 32, 2, false },
        { "int-2:group=32,axis=channel", 32, 2, false },
        { "int-4:group=32", 32, 4, false },
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        double want = rows[i].symmetric ? symmetric_mse(rows[i].group, rows[i].bits)
                                        : asymmetric_mse(rows[i].group, rows[i].bits);
        double mse, error, rounding = 2 * sqrt(want) * pow(2, -11) * (rows[i].symmetric ? 1 : 5);
        measure(rows[i].spec, KVANT_ROLE_V, &mse, &error);
        print_message("%-34s mse %.5f +- %.5f, integral %.5f\n", rows[i].spec, mse, error, want);
        if (!(fabs(mse - want) <= 3 * error + rounding))
            fail_msg("%s: mse %.5f, not %.5f", rows[i].spec, mse, want);
    }
}

/* --- hybrid groups --- */

static bool is_asymmetric(const page *p, size_t scale)
{
    return ((const uint16_t *)((const uint8_t *)p->bytes + p->info.metadata_offset))[scale] >> 15;
}

/* Numbers of groups that suit different arms: normal, one-sided, far from zero, with one outlier,
 * constant, zero. */
static void fill_groups(float *x, uint32_t d, uint64_t *rng)
{
    fill_normal(x, (size_t)64 * d, rng);
    for (uint32_t t = 0; t < 64; t++)
        for (uint32_t j = 0; j < d; j++) {
            float *number = x + t * d + j;
            uint32_t kind = (j / 8 + t / 32) % 6;
            *number = kind == 1                       ? fabsf(*number)
                      : kind == 2                     ? 10 + *number
                      : kind == 3 && t % 32 == j % 32 ? 30.0f
                      : kind == 4                     ? 0.25f * (float)j
                      : kind == 5 && t < 32           ? 0
                                                      : *number;
        }
}

typedef struct group_error {
    double squared, absolute;
} group_error;

/* The error of the group that holds token t and channel j: a group is tokens of one channel or
 * channels of one token. */
static group_error error_of(const float *x, const float *decoded, uint32_t d, bool per_channel,
                            uint32_t t, uint32_t j)
{
    group_error e = { 0 };
    for (uint32_t i = 0; i < 32; i++) {
        size_t at = per_channel ? (size_t)(t + i) * d + j : (size_t)t * d + j + i;
        double difference = (double)x[at] - decoded[at];
        e.squared += difference * difference;
        e.absolute += fabs(difference);
    }
    return e;
}

/* Every group has the error of its better arm. The encoder sums 32 differences in binary32. Each
 * errs by at most 2^-24 of a decoded number, which is 2^-19 at magnitude 30. The sums err by 37
 * 2^-24 of themselves. So a group whose arms are that close may choose either. */
CASE(hybrid_takes_the_better_arm)
{
    static const struct {
        const char *hybrid, *symmetric, *asymmetric;
        bool per_channel, absolute;
    } rows[] = {
        { "int-2:hybrid,group=32,axis=channel", "int-2:sym,group=32,axis=channel",
          "int-2:group=32,axis=channel", true, false },
        { "int-3:hybrid,group=32,axis=channel", "int-3:sym,group=32,axis=channel",
          "int-3:group=32,axis=channel", true, false },
        { "int-3:hybrid,group=32", "int-3:sym,group=32", "int-3:group=32", false, false },
        { "int-3:hybrid=code,group=32,axis=channel", "int-3:sym,group=32,axis=channel",
          "int-2:group=32,axis=channel", true, true },
    };
    enum { D = 96 };
    static float x[64 * D], hybrid[64 * D], symmetric[64 * D], asymmetric[64 * D];
    uint64_t rng = 34;
    for (size_t i = 0; i < COUNT(rows); i++)
        for (uint32_t pages = 0; pages < 20; pages++) {
            uint32_t taken[2] = { 0 };
            fill_groups(x, D, &rng);
            encode_decode(rows[i].hybrid, D, KVANT_ROLE_V, x, hybrid);
            encode_decode(rows[i].symmetric, D, KVANT_ROLE_V, x, symmetric);
            encode_decode(rows[i].asymmetric, D, KVANT_ROLE_V, x, asymmetric);
            for (uint32_t t = 0; t < 64; t += rows[i].per_channel ? 32 : 1)
                for (uint32_t j = 0; j < D; j += rows[i].per_channel ? 1 : 32) {
                    group_error h = error_of(x, hybrid, D, rows[i].per_channel, t, j);
                    group_error s = error_of(x, symmetric, D, rows[i].per_channel, t, j);
                    group_error a = error_of(x, asymmetric, D, rows[i].per_channel, t, j);
                    double got = rows[i].absolute ? h.absolute : h.squared;
                    double sym = rows[i].absolute ? s.absolute : s.squared;
                    double asym = rows[i].absolute ? a.absolute : a.squared;
                    double best = sym < asym ? sym : asym;
                    if (!(got >= best && got <= best * (1 + 80 * pow(2, -24)) + 32 * pow(2, -19)))
                        fail_msg("%s: error %g of a group, arms %g and %g", rows[i].hybrid, got,
                                 sym, asym);
                    taken[asym < sym]++;
                }
            assert_true(taken[0] > 0 && taken[1] > 0);
        }
}

/* Share of groups of 32 normal numbers for which two bits err less with asymmetric levels, counted
 * in binary64 by brute force. Asymmetric levels are all levels between the extremes (the paper's
 * text) or the two extremes alone (the authors' program). */
static double asymmetric_share(bool code, uint32_t n_groups, uint64_t *rng)
{
    uint32_t count = 0;
    for (uint32_t g = 0; g < n_groups; g++) {
        double x[32], min = 100, max = -100, sym = 0, asym = 0;
        for (uint32_t i = 0; i < 32; i++) {
            x[i] = test_normal(rng);
            min = fmin(min, x[i]);
            max = fmax(max, x[i]);
        }
        double largest = fmax(-min, max), step = (max - min) / (code ? 1 : 3);
        for (uint32_t i = 0; i < 32; i++) {
            double s = fabs(x[i] - largest * round(x[i] / largest)),
                   a = fabs(x[i] - min - step * round((x[i] - min) / step));
            sym += code ? s : s * s;
            asym += code ? a : a * a;
        }
        count += asym < sym;
    }
    return (double)count / n_groups;
}

/* InnerQ's section 6.2 finds 99 % of all groups symmetric. With four asymmetric levels against
 * three symmetric levels, as section 4.1.2 says, nearly all normal groups are asymmetric. With the
 * two levels of the authors' program nearly none are. */
CASE(share_of_asymmetric_groups)
{
    enum { PAGES = 20, D = 128, GROUPS = PAGES * D * 2 };
    static float x[64 * D];
    uint64_t rng = 35;
    for (int code = 0; code < 2; code++) {
        uint32_t count = 0;
        for (uint32_t i = 0; i < PAGES; i++) {
            fill_normal(x, COUNT(x), &rng);
            page p =
                encode(code ? "innerq-hybrid:hybrid=code" : "innerq-hybrid", D, KVANT_ROLE_V, x);
            for (size_t at = 0; at < 2 * D; at++)
                count += is_asymmetric(&p, at);
            free_page(&p);
        }
        double share = (double)count / GROUPS, want = asymmetric_share(code, GROUPS, &rng);
        /* Both shares are counts of GROUPS trials. 3 / GROUPS is the 95 % bound for a count of
         * zero. */
        double spread = 3 * sqrt(2 * want * (1 - want) / GROUPS) + 3.0 / GROUPS;
        print_message("hybrid=%s: %.2f %% of normal groups asymmetric, by brute force %.2f %%\n",
                      code ? "code" : "paper", 100 * share, 100 * want);
        assert_true(fabs(share - want) <= spread);
        assert_true(code ? share < 0.01 : share > 0.95);
    }
}

/* Section 4.1.2: a group of positive numbers needs its zero point, and a tie stays symmetric.
 * The authors' levels of one bit less may need a scale beyond fp16; then the group cannot choose
 * them. */
CASE(choices_with_a_known_answer)
{
    static const struct {
        float base, spread;
        bool paper, code;
    } rows[] = {
        { 10, 1, true, true },  { -10, 1, true, true },  { 0, 0, false, false },
        { 3, 0, false, false }, { -3, 0, false, false }, { -60000, 120000, true, false },
    };
    for (size_t i = 0; i < COUNT(rows); i++)
        for (int code = 0; code < 2; code++) {
            float x[64 * 16], decoded[64 * 16];
            for (uint32_t k = 0; k < COUNT(x); k++)
                x[k] = rows[i].base + rows[i].spread * (float)(k / 16 % 32) / 31.0f;
            page p =
                encode(code ? "innerq-hybrid:hybrid=code" : "innerq-hybrid", 16, KVANT_ROLE_V, x);
            for (size_t at = 0; at < 32; at++)
                assert_int_equal(is_asymmetric(&p, at), code ? rows[i].code : rows[i].paper);
            assert_ok(kvant_codec_decode(p.codec, NULL, p.bytes, 0, 64, decoded, 16));
            for (uint32_t k = 0; k < COUNT(x); k++)
                assert_true(isfinite(decoded[k]) && (rows[i].spread != 0 || decoded[k] == x[k]));
            free_page(&p);
        }
}

RUN_CASES(NULL, NULL)
