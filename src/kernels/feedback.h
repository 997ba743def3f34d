/* feedback.h - arguments of rounding with error feedback: a factorised quadratic form of errors.
 * format.md, "Feedback", has the formulas. */
#pragma once

#include <stdint.h>

#include <kvant/codec.h>

/* The loss of a row with error e is the sum of pivots[i] (e_i + sum over j < i of L_ij e_j)^2. */
typedef struct kvant_feedback {
    uint32_t n, stride; /* n rounded up to a multiple of 16 */
    float pivots[KVANT_MAX_HEAD_DIM];
    float columns
        []; /* L by columns, n of them of stride numbers; zeros up to the diagonal and behind n */
} kvant_feedback;

/* What the scale of a row is made of: its own loss, and the product of the row and its decoded
 * self. */
typedef struct kvant_feedback_sums {
    float own, product;
} kvant_feedback_sums;
