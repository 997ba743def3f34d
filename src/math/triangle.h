/* triangle.h - a lower triangle whose numbers below the diagonal have 4 bits: where its numbers
 * lie, and how a row is rounded. The kernels read it (kernels.h). It refuses nothing.
 *
 * A triangle of n rows is an array of kvant_triangle_size(n) halves: a step per row in binary16,
 * the diagonal in binary16, then codes of 4 bits. Number j of row i is the row's step times its
 * code, which is -7 to 7 in two's complement. Each row of codes begins at a byte, and number 0 is
 * in the low half of its first byte. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/half.h"
#include "parts.h"

#define KVANT_TRIANGLE_CODE 7 /* the largest code */

/* The codes of row i. The rows before it have 0, 1, 1, 2, 2, ... bytes. */
static inline const uint8_t *kvant_triangle_codes(const uint16_t *triangle, size_t n, size_t i)
{
    return (const uint8_t *)(triangle + 2 * n) + i * i / 4;
}

/* The nearest code, as roundf() rounds. That function is not called: a matrix of 128 channels takes
 * 8,000 calls. */
static inline int kvant_triangle_code(float number, float step)
{
    const float size = step > 0 ? fabsf(number / step) : 0;
    const int whole = size < KVANT_TRIANGLE_CODE ? (int)size : KVANT_TRIANGLE_CODE,
              code = whole + (whole < KVANT_TRIANGLE_CODE && size - (float)whole >= 0.5f);
    return number < 0 ? -code : code;
}

/* Rounds numbers 0 .. i of a row and stores them. */
static inline void kvant_triangle_set_row(uint16_t *triangle, size_t n, size_t i, const float *row)
{
    uint8_t *codes = (uint8_t *)(triangle + 2 * n) + i * i / 4;
    float most = 0;
    for (size_t j = 0; j < i; j++)
        most = fabsf(row[j]) > most ? fabsf(row[j]) : most;
    triangle[i] = kvant_half_from_float(most / KVANT_TRIANGLE_CODE);
    triangle[n + i] = kvant_half_from_float(row[i]);
    const float step = kvant_half_to_float(triangle[i]);
    for (size_t j = 0; j < i; j++) {
        const int code = kvant_triangle_code(row[j], step);
        codes[j / 2] = (uint8_t)(j % 2 ? codes[j / 2] | (code & 15) << 4 : code & 15);
    }
}
