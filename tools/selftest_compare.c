/* selftest_compare.c - compares the results of a device with a problem of selftest_problem.c, and
 * says which page, row or query is wrong, and how far off it is. */
#include "selftest.h"

#include <math.h>
#include <stdarg.h>

void test_note(test_result *r, test_step step, test_state found, const char *format, ...)
{
    va_list words;
    if (found > r->state[step])
        r->state[step] = found;
    if (found <= TEST_RIGHT || r->why[0] != 0)
        return;
    va_start(words, format);
    vsnprintf(r->why, sizeof r->why, format, words);
    va_end(words);
}

test_state test_state_of(const test_result *r)
{
    test_state worst = TEST_NOT_DONE;
    bool all = true;
    for (int i = 0; i < TEST_STEPS; i++) {
        worst = r->state[i] > worst ? r->state[i] : worst;
        all = all && r->state[i] != TEST_NOT_DONE;
    }
    return worst == TEST_RIGHT && !all ? TEST_NOT_DONE : worst;
}

static const char *const names[] = { "keys", "values" };

void test_compare_pages(test_result *r, const test_problem *p, const uint8_t *pages)
{
    for (uint32_t role = 0; role < 2; role++) {
        const size_t page_bytes = p->info[role].page_bytes;
        const size_t bytes = TEST_BLOCKS * TEST_KV_HEADS * page_bytes;
        size_t wrong = 0, first = 0, first_at = 0;
        for (size_t i = bytes; i-- > 0;) {
            const uint32_t page = (uint32_t)(i / page_bytes), block = page / TEST_KV_HEADS;
            const size_t at =
                i % page_bytes + test_page_at(p, (kvant_role)role, block, page % TEST_KV_HEADS);
            if (pages[at] != p->pages[at])
                first = i, first_at = at, wrong++;
        }
        test_note(r, TEST_ENCODE, wrong ? TEST_WRONG : TEST_RIGHT,
                  "encode of %s: %zu of %zu bytes differ, first byte %zu of page %zu, "
                  "kv head %zu: %02x, not %02x",
                  names[role], wrong, bytes, first % page_bytes, first / page_bytes / TEST_KV_HEADS,
                  first / page_bytes % TEST_KV_HEADS, pages[first_at], p->pages[first_at]);
    }
}

/* Notes error / bound, which must not be above 1; NaNs count. */
static test_state note_error(test_result *r, test_step step, double error, double bound)
{
    r->share[step] = error / bound <= r->share[step] ? r->share[step] : error / bound;
    return error <= bound ? TEST_RIGHT : TEST_WRONG;
}

/* Decoding multiplies codes by a scale, adds a zero point, applies the inverse rotation or a matrix
 * and a factor, and adds a centre. That is at most d + 20 roundings of binary32, of numbers no
 * longer than the row and its centre. The numbers of a calibration's matrix cancel, which is taken
 * to enlarge the error four times. */
void test_compare_rows(test_result *r, const test_problem *p, kvant_role role, const float *rows)
{
    const uint32_t d = p->pair.head_dim;
    for (uint32_t i = 0; i < TEST_ROWS * TEST_KV_HEADS; i++) {
        const float *want = p->decoded[role] + (size_t)i * d, *got = rows + (size_t)i * d;
        const float *center = p->affine[role][i % TEST_KV_HEADS].center;
        double square = 0, error = 0;
        for (uint32_t j = 0; j < d; j++) {
            const double difference = fabs((double)got[j] - want[j]);
            const double shift = center != NULL ? (double)center[j] : 0;
            error = difference <= error ? error : difference; /* NaNs count */
            square += (double)want[j] * want[j] + shift * shift;
        }
        const double bound = 4 * (d + 20) * 0x1p-24 * sqrt(square) + 1e-30;
        test_note(r, TEST_DECODE, note_error(r, TEST_DECODE, error, bound),
                  "decode of %s, token %u, kv head %u: off by %.3g, bound %.3g", names[role],
                  i / TEST_KV_HEADS, i % TEST_KV_HEADS, error, bound);
    }
}

static void compare_head(test_result *r, const test_problem *p, const test_call *c,
                         const test_outputs *got, uint32_t query, uint32_t head)
{
    const uint32_t d = p->pair.head_dim;
    const size_t row = (size_t)(query / c->step) * TEST_HEADS + head,
                 at = (size_t)query * TEST_HEADS + head;
    const test_output *want = &c->outputs[row];
    const float *out = got->out + at * d;
    double error = 0, length = 0;
    for (uint32_t j = 0; j < d; j++) {
        const double number = c->out[row * d + j];
        error += (out[j] - number) * (out[j] - number);
        length += number * number;
    }
    error = sqrt(error), length = sqrt(length);
    const double bound = want->bound[got->place] + got->rounding * length;
    test_note(r, TEST_ATTENTION, note_error(r, TEST_ATTENTION, error, bound),
              "attention of %u query tokens, token %u, head %u: off by %.3g of %.3g, bound %.3g",
              c->n_queries, query, head, error, length, bound);
    const double lse = want->lse + (got->centered ? want->center : 0);
    const double off = fabs(got->lse[at] - lse);
    test_note(r, TEST_ATTENTION, off <= want->lse_bound[got->place] ? TEST_RIGHT : TEST_WRONG,
              "log-sum-exp of %u query tokens, token %u, head %u: off by %.3g of %.3g, bound %.3g",
              c->n_queries, query, head, off, lse, want->lse_bound[got->place]);
}

void test_compare_call(test_result *r, const test_problem *p, size_t call, const test_outputs *got)
{
    const test_call *c = &p->calls[call];
    for (uint32_t i = c->step - 1; i < c->n_queries; i += c->step)
        for (uint32_t head = 0; head < TEST_HEADS; head++)
            compare_head(r, p, c, got, i, head);
}
