/* fills.c - random numbers and the fills of buffers. */
#include "checker.h"

uint64_t check_random(checker *check)
{
    return kvant_splitmix64(&check->rng);
}

uint32_t check_below(checker *check, uint32_t n)
{
    return (uint32_t)((check_random(check) >> 32) * n >> 32);
}

float check_uniform(checker *check)
{
    return ((float)(check_random(check) >> 41) + 0.5f) * 0x1p-23f;
}

/* Marsaglia's polar method. It uses one of the two numbers of the method, so that a number depends
 * only on the generator. */
float check_normal(checker *check)
{
    double x, y, square;
    do {
        x = 2 * check_uniform(check) - 1;
        y = 2 * check_uniform(check) - 1;
        square = x * x + y * y;
    } while (square >= 1 || square == 0);
    return (float)(x * sqrt(-2 * log(square) / square));
}

const char *check_fill_name(check_fill fill)
{
    static const char *const names[CHECK_N_FILLS] = { "normal",   "zeros",    "largest",
                                                      "smallest", "denormal", "awkward" };
    return names[fill];
}

static float awkward(checker *check, const float *x, size_t i)
{
    switch (check_below(check, 12)) {
    case 0: return check_below(check, 2) ? -0.0f : 0.0f;
    case 1: return check_normal(check) * 1e-40f;
    case 2: return check_normal(check) * 1e30f;
    case 3: return i ? x[i - 1] : 0;
    default: return check_normal(check);
    }
}

void check_floats(checker *check, float *x, size_t n, check_fill fill)
{
    for (size_t i = 0; i < n; i++)
        switch (fill) {
        case CHECK_ZEROS: x[i] = 0; break;
        case CHECK_LARGEST: x[i] = 0x1p40f; break;
        case CHECK_SMALLEST: x[i] = -0x1p40f; break;
        case CHECK_DENORMAL: x[i] = check_normal(check) * 0x1p-130f; break;
        case CHECK_AWKWARD: x[i] = awkward(check, x, i); break;
        default: x[i] = check_normal(check); break;
        }
}

void check_bytes(checker *check, void *bytes, size_t n, int value)
{
    uint8_t *p = bytes;
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)(value < 0 ? check_random(check) >> 56 : (uint64_t)value);
}
