/* check_packs.c - products with the codes of an index, which are exact, and the keys made from
 * them, with the same bits at every level. */
#include "check.h"

static const struct {
    uint32_t bits, largest;
} widths[] = { { 1, 1 }, { 2, 10 }, { 3, 26 }, { 4, 61 }, { 8, 128 } };

typedef struct packs {
    kvant_pack_format *format;
    uint8_t *codes;
    kvant_pack_queries *queries;
    int32_t *dots;
} packs;

/* kind 0: random; 1 and 2: the largest magnitudes, with equal and with alternating signs. */
static int8_t query_number(checker *check, uint32_t kind, uint32_t i)
{
    if (kind == 0)
        return (int8_t)((int)check_below(check, 255) - 127);
    return kind == 1 || i % 2 ? 127 : -127;
}

static packs make_packs(checker *check, uint32_t w, uint32_t dim, uint32_t n, uint32_t kind)
{
    packs p;
    const uint32_t bits = widths[w].bits, quads = kvant_pack_quads(dim, bits);
    p.format = check_input(check, "format", sizeof *p.format, 4);
    *p.format =
        (kvant_pack_format){ .bits = bits, .n_quads = quads, .bias = (uint8_t)widths[w].largest };
    for (uint32_t i = 0; bits < 8 && i < 16;
         i++) /* any within the bias: books need not be symmetric */
        p.format->levels[i] =
            (int8_t)((int)(i % (1u << bits) * 2 * widths[w].largest / ((1u << bits) - 1)) -
                     (int)widths[w].largest);
    p.codes = check_input(check, "codes", kvant_pack_bytes(p.format), 64);
    check_bytes(check, p.codes, kvant_pack_bytes(p.format), kind == 0 ? -1 : kind == 1 ? 0xff : 0);
    int8_t *x = check_input(check, "x", (size_t)quads * n * 4, 4);
    int32_t *sums = check_input(check, "sums", n * sizeof *sums, 4);
    for (uint32_t i = 0; i < n; i++)
        sums[i] = 0;
    for (uint32_t i = 0; i < quads * n * 4; i++) {
        x[i] = query_number(check, kind, i);
        sums[i / 4 % n] += x[i];
    }
    p.queries = check_input(check, "queries", sizeof *p.queries, 8);
    *p.queries = (kvant_pack_queries){ .x = x, .sums = sums, .n = n };
    p.dots = check_output(check, "dots", (size_t)n * 32 * sizeof *p.dots, 64);
    return p;
}

/* The product by the layout of packs.h, written a second time. */
static int32_t wanted_dot(const packs *p, uint32_t query, uint32_t v)
{
    const uint32_t bits = p->format->bits, per_chunk = 8 / bits;
    int32_t sum = 0;
    for (uint32_t dim = 0; dim < 4 * p->format->n_quads; dim++) {
        const uint32_t plane = 2 * (dim / 4) + (v >= 16), in_chunk = 4 * (v & 15) + (dim & 3);
        uint32_t code;
        if (bits ==
            3) { /* In 16 dimensions: planes 0 .. 3 and 4 .. 7 of 2 bits, then 8 planes of 1 bit */
            const uint8_t *chunks = p->codes + 192 * (plane / 8) + in_chunk;
            code = (uint32_t)chunks[64 * (plane % 8 / 4)] >> 2 * (plane % 4) & 3;
            code |= ((uint32_t)chunks[128] >> plane % 8 & 1) << 2;
        } else {
            code = (uint32_t)p->codes[64 * (plane / per_chunk) + in_chunk] >>
                       (plane % per_chunk * bits) &
                   ((1u << bits) - 1);
        }
        sum += (bits == 8 ? (int32_t)code - 128 : p->format->levels[code]) *
               p->queries->x[(dim / 4 * p->queries->n + query) * 4 + dim % 4];
    }
    return sum;
}

CHECK(pack_dots)
{
    static const uint32_t dims[] = { 1, 4, 5, 16, 33, 100, 384 }, ns[] = { 1, 2, 3, 5, 8, 11, 32 };
    int32_t want[32 * 32];
    for (uint32_t w = 0; w < COUNT(widths); w++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (size_t q = 0; q < COUNT(ns); q++)
                for (uint32_t kind = 0; kind < 3; kind++) {
                    check_case(check, "%u bits, %u dimensions, %u queries, kind %u", widths[w].bits,
                               dims[d], ns[q], kind);
                    packs p = make_packs(check, w, dims[d], ns[q], kind);
                    for (uint32_t i = 0; check_compares(check) && i < ns[q] * 32; i++)
                        want[i] = wanted_dot(&p, i / 32, i % 32);
                    CHECK_CALL(check, kernels->pack_dots(p.format, p.codes, p.queries, p.dots));
                    check_same(check, "dots", p.dots, want, (size_t)ns[q] * 32, sizeof *want);
                }
}

BENCH(pack_dots)
{
    for (uint32_t w = 0; w < COUNT(widths); w++)
        for (uint32_t n = 1; n <= 32; n *= 32) {
            check_case(check, "bench");
            packs p = make_packs(check, w, 384, n, 0);
            CHECK_BENCH(check, kernels->pack_dots(p.format, p.codes, p.queries, p.dots),
                        "%u bits, 384 x 32 x %u", widths[w].bits, n);
        }
}

typedef struct keyed {
    int32_t *dots;
    float *factors, *offsets, *scales, *weights, *thresholds, *keys;
    uint32_t *masks;
} keyed;

static keyed make_keyed(checker *check, uint32_t n, check_fill fill, bool offsets)
{
    keyed p = { .offsets = NULL };
    check_case(check, "%u queries, %s%s", n, check_fill_name(fill), offsets ? ", offsets" : "");
    p.dots = check_input(check, "dots", n * 32 * sizeof *p.dots, 64);
    p.factors = check_input(check, "factors", 32 * sizeof *p.factors, 64);
    p.scales = check_input(check, "scales", n * sizeof *p.scales, 4);
    p.weights = check_input(check, "weights", n * sizeof *p.weights, 4);
    p.thresholds = check_input(check, "thresholds", n * sizeof *p.thresholds, 4);
    p.keys = check_output(check, "keys", n * 32 * sizeof *p.keys, 64);
    p.masks = check_output(check, "masks", n * sizeof *p.masks, 4);
    if (offsets) {
        p.offsets = check_input(check, "offsets", 32 * sizeof *p.offsets, 64);
        check_floats(check, p.offsets, 32, fill);
    }
    for (uint32_t i = 0; i < n * 32; i++) /* beyond 2^24, conversions round */
        p.dots[i] = (int32_t)check_below(check, 1u << 29) - (1 << 28);
    check_floats(check, p.factors, 32, fill);
    check_floats(check, p.scales, n, CHECK_NORMAL);
    check_floats(check, p.weights, n, CHECK_NORMAL);
    for (uint32_t i = 0; i < n; i++) { /* a threshold that equals a key, no threshold, all */
        const uint32_t v = check_below(check, 32);
        const float key = (float)p.dots[i * 32 + v] * p.factors[v] * p.scales[i];
        p.thresholds[i] = i % 4 == 3   ? -INFINITY
                          : i % 4 == 2 ? INFINITY
                          : p.offsets  ? key + p.offsets[v] * p.weights[i]
                                       : key;
    }
    return p;
}

CHECK(pack_keys)
{
    static const uint32_t ns[] = { 1, 2, 7, 32 };
    float keys[32 * 32];
    uint32_t masks[32];
    for (size_t q = 0; q < COUNT(ns); q++)
        for (int fill = 0; fill < CHECK_N_FILLS; fill++)
            for (uint32_t offsets = 0; offsets < 2; offsets++) {
                keyed p = make_keyed(check, ns[q], (check_fill)fill, offsets);
                c->pack_keys(p.dots, p.factors, p.offsets, p.scales, p.weights, p.thresholds, ns[q],
                             keys, masks);
                CHECK_CALL(check,
                           kernels->pack_keys(p.dots, p.factors, p.offsets, p.scales, p.weights,
                                              p.thresholds, ns[q], p.keys, p.masks));
                check_same(check, "keys", p.keys, keys, (size_t)ns[q] * 32, sizeof *keys);
                check_same(check, "masks", p.masks, masks, ns[q], sizeof *masks);
            }
}

BENCH(pack_keys)
{
    keyed p = make_keyed(check, 32, CHECK_NORMAL, false);
    CHECK_BENCH(check,
                kernels->pack_keys(p.dots, p.factors, NULL, p.scales, p.weights, p.thresholds, 32,
                                   p.keys, p.masks),
                "32 queries");
}
