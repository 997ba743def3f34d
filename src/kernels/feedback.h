/* feedback.h - arguments of rounding with error feedback: a factorised quadratic form of errors.
 * format.md, "Feedback", has the formulas. */
#pragma once

#include <stdint.h>

#include <kvant/codec.h>

/* The loss of a row with error e is the sum of pivots[i] (e_i + sum over j < i of L_ij e_j)^2. */
typedef struct kvant_feedback {
    uint32_t n, stride; /* n rounded up to a multiple of 16 */
    float pivots[KVANT_MAX_HEAD_DIM];
    /* L column by column: n columns of stride numbers, with zeros up to the diagonal and behind
     * n */
    float columns[];
} kvant_feedback;

/* The two sums that a row's scale is made of: the loss of the row itself, and the product of the
 * row and the decoded row. */
typedef struct kvant_feedback_sums {
    float own, product;
} kvant_feedback_sums;
