/* selftest_compare.c - compares what a device computed with a problem of selftest_problem.c, and
 * says what is wrong: which page, row or query, and how far off. */
#include "selftest.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void test_note(test_result *r, test_state *state, test_state found, const char *format, ...)
{
    va_list words;
    if (found > *state)
        *state = found;
    if (found <= TEST_RIGHT || r->why[0] != 0)
        return;
    va_start(words, format);
    vsnprintf(r->why, sizeof r->why, format, words);
    va_end(words);
}

static const char *name_of(kvant_role role)
{
    return role == KVANT_ROLE_K ? "keys" : "values";
}

void test_compare_pages(test_result *r, const test_problem *p, kvant_role role,
                        const uint8_t *pages)
{
    const size_t page_bytes = p->info[role].page_bytes,
                 bytes = TEST_BLOCKS * TEST_KV_HEADS * page_bytes;
    size_t first = bytes, wrong = 0;
    for (size_t i = bytes; i-- > 0;)
        if (pages[i] != p->pages[role][i])
            first = i, wrong++;
    test_note(r, &r->encode, wrong ? TEST_WRONG : TEST_RIGHT,
              "encode of %s: %zu of %zu bytes differ, first byte %zu of page %zu, kv head %zu: "
              "%02x, not %02x",
              name_of(role), wrong, bytes, first % page_bytes, first / page_bytes / TEST_KV_HEADS,
              first / page_bytes % TEST_KV_HEADS, first < bytes ? pages[first] : 0,
              first < bytes ? p->pages[role][first] : 0);
}

/* Decoding is a product with a scale, a zero point, the inverse rotation or a matrix, a factor and
 * a centre: at most d + 20 roundings of binary32 of numbers no longer than the row and its centre.
 * A matrix of a calibration, whose numbers cancel, is taken to enlarge that four times. */
void test_compare_rows(test_result *r, const test_problem *p, kvant_role role, const float *rows)
{
    const uint32_t d = p->pair.head_dim;
    for (uint32_t i = 0; i < TEST_ROWS * TEST_KV_HEADS; i++) {
        const float *want = p->decoded[role] + (size_t)i * d, *got = rows + (size_t)i * d;
        const float *center = p->affine[role][i % TEST_KV_HEADS].center;
        double square = 0, error = 0;
        for (uint32_t j = 0; j < d; j++) {
            const double difference = fabs((double)got[j] - want[j]);
            error = difference <= error ? error : difference; /* NaNs count */
            square +=
                (double)want[j] * want[j] + (center != NULL ? (double)center[j] * center[j] : 0);
        }
        const double bound = 4 * (d + 20) * 0x1p-24 * sqrt(square) + 1e-30;
        r->decode_share = error / bound <= r->decode_share ? r->decode_share : error / bound;
        test_note(r, &r->decode, error <= bound ? TEST_RIGHT : TEST_WRONG,
                  "decode of %s, token %u, kv head %u: off by %.3g, bound %.3g", name_of(role),
                  i / TEST_KV_HEADS, i % TEST_KV_HEADS, error, bound);
    }
}

static double error_of(const float *got, const double *want, uint32_t d, double *length)
{
    double error = 0, square = 0;
    for (uint32_t j = 0; j < d; j++) {
        error += (got[j] - want[j]) * (got[j] - want[j]);
        square += want[j] * want[j];
    }
    *length = sqrt(square);
    return sqrt(error);
}

static void compare_head(test_result *r, const test_problem *p, const test_call *c,
                         const test_outputs *got, uint32_t query, uint32_t head)
{
    const uint32_t d = p->pair.head_dim;
    const size_t row = (size_t)(query / c->step) * TEST_HEADS + head,
                 at = (size_t)query * TEST_HEADS + head;
    double length;
    const double error = error_of(got->out + at * d, c->out + row * d, d, &length);
    const double bound = c->bound[got->place][row] + got->rounding * length;
    r->attention_share = error / bound <= r->attention_share ? r->attention_share : error / bound;
    test_note(r, &r->attention, error <= bound ? TEST_RIGHT : TEST_WRONG,
              "attention of %u query tokens, token %u, head %u: off by %.3g of %.3g, bound %.3g",
              c->n_queries, query, head, error, length, bound);
    const double lse = c->lse[row] + (got->centered ? c->center[row] : 0);
    const double off = got->lse != NULL ? fabs(got->lse[at] - lse) : 0;
    test_note(r, &r->attention, off <= c->lse_bound[got->place][row] ? TEST_RIGHT : TEST_WRONG,
              "log-sum-exp of %u query tokens, token %u, head %u: off by %.3g of %.3g, bound %.3g",
              c->n_queries, query, head, off, lse, c->lse_bound[got->place][row]);
}

void test_compare_call(test_result *r, const test_problem *p, size_t call, const test_outputs *got)
{
    const test_call *c = &p->calls[call];
    for (uint32_t i = c->step - 1; i < c->n_queries; i += c->step)
        for (uint32_t head = 0; head < TEST_HEADS; head++)
            compare_head(r, p, c, got, i, head);
}
