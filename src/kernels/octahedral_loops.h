/* octahedral_loops.h - codes of triplets (OCTOPUS, section 3): directions and norms of 16 triplets
 * at a time.
 *
 * Plain loops over 16 lanes that compilers vectorise. loops_c.c and the file of each CPU level
 * include them, so all levels compile the same source. Without contraction all levels give the same
 * bits. format.md, "Octahedral codes", has formulas and the order of operations.
 *
 * The quality of a candidate direction is the squared cosine with the sign of the cosine, dot |dot|
 * / den. Two candidates are compared crosswise, so a search needs no square root and no
 * division. */
#include <math.h>

#include "../math/octahedral.h"
#include "kernels.h"

#define OCTAHEDRAL_LANES 16u

/* The direction of each triplet as a point of the octahedron, and as a point of the square. */
typedef struct octahedral_direction {
    float x[OCTAHEDRAL_LANES], y[OCTAHEDRAL_LANES], z[OCTAHEDRAL_LANES];
    float length[OCTAHEDRAL_LANES]; /* |x| + |y| + |z| of the triplet */
    float u[OCTAHEDRAL_LANES], w[OCTAHEDRAL_LANES];
} octahedral_direction;

/* Candidate levels of one coordinate. The first has index `first`, where -1 stands for 0. */
typedef struct octahedral_candidates {
    float level[3][OCTAHEDRAL_LANES];
    int32_t first[OCTAHEDRAL_LANES];
} octahedral_candidates;

typedef struct octahedral_best {
    float dot[OCTAHEDRAL_LANES], quality[OCTAHEDRAL_LANES], den[OCTAHEDRAL_LANES];
    int32_t a[OCTAHEDRAL_LANES], b[OCTAHEDRAL_LANES];
} octahedral_best;

static void octahedral_project(const kvant_triplets *t, uint32_t at, octahedral_direction *p)
{
    for (uint32_t j = 0; j < OCTAHEDRAL_LANES; j++) {
        float x = t->x[at + j], y = t->y[at + j], z = t->z[at + j];
        float length = fabsf(x) + fabsf(y) + fabsf(z);
        length = length > 0 ? length : 1;
        x /= length;
        y /= length;
        z /= length;
        float fold = z < 0 ? -z : 0;
        p->x[j] = x;
        p->y[j] = y;
        p->z[j] = z;
        p->length[j] = length;
        p->u[j] = x + copysignf(fold, x);
        p->w[j] = y + copysignf(fold, y);
    }
}

/* The number of thresholds below each x. Comparing 16 numbers with all thresholds is faster than a
 * search. Counting 8 thresholds at a time keeps the counts in registers, so thresholds come in
 * eights, and the last ones lie above every number. */
static void octahedral_count(const float *thresholds, uint32_t n, const float *x, int32_t *count)
{
    for (uint32_t j = 0; j < OCTAHEDRAL_LANES; j++)
        count[j] = 0;
    for (uint32_t k = 0; k < n; k += 8)
        for (uint32_t j = 0; j < OCTAHEDRAL_LANES; j++) {
            const float *t = thresholds + k;
            count[j] += (x[j] > t[0]) + (x[j] > t[1]) + (x[j] > t[2]) + (x[j] > t[3]) +
                        (x[j] > t[4]) + (x[j] > t[5]) + (x[j] > t[6]) + (x[j] > t[7]);
        }
}

/* Finds the level nearest to each number and its two neighbours. */
static void octahedral_near(const kvant_triplet_book *book, const float *x,
                            octahedral_candidates *near)
{
    int32_t count[OCTAHEDRAL_LANES], last = (int32_t)(1u << book->direction_bits) - 1;
    octahedral_count(book->direction_thresholds, 1u << book->direction_bits, x, count);
    for (uint32_t j = 0; j < OCTAHEDRAL_LANES; j++) {
        int32_t i = count[j];
        near->first[j] = i - 1;
        near->level[0][j] = book->direction[i > 0 ? i - 1 : 0];
        near->level[1][j] = book->direction[i];
        near->level[2][j] = book->direction[i < last ? i + 1 : last];
    }
}

/* Reduces the three candidates to the nearest alone, the nearest and the next higher one, or the
 * two around the number. */
static void octahedral_narrow(const float *x, kvant_triplet_rounding rounding,
                              octahedral_candidates *near)
{
    bool from_nearest = rounding == KVANT_ROUND_SCALAR || rounding == KVANT_ROUND_NEXT;
    for (uint32_t j = 0; from_nearest && j < OCTAHEDRAL_LANES; j++) {
        near->level[0][j] = near->level[1][j];
        near->level[1][j] = near->level[2][j];
        near->first[j]++;
    }
    for (uint32_t j = 0; rounding == KVANT_ROUND_2X2 && j < OCTAHEDRAL_LANES; j++) {
        float middle = near->level[1][j];
        near->level[0][j] = x[j] > middle ? middle : near->level[0][j];
        near->level[1][j] = x[j] > middle ? near->level[2][j] : middle;
        near->first[j] += x[j] > middle;
    }
}

/* Makes candidate (a, b), at u and w of the square, the best one where it is better. */
static void octahedral_try(const octahedral_direction *p, const float *u, const float *w, int32_t a,
                           int32_t b, octahedral_best *best)
{
    for (uint32_t j = 0; j < OCTAHEDRAL_LANES; j++) {
        float x, y, z;
        kvant_octahedral_point(u[j], w[j], &x, &y, &z);
        float dot = p->x[j] * x + p->y[j] * y + p->z[j] * z, den = x * x + y * y + z * z;
        float quality = dot * fabsf(dot);
        int better = quality * best->den[j] > best->quality[j] * den;
        best->dot[j] = better ? dot : best->dot[j];
        best->quality[j] = better ? quality : best->quality[j];
        best->den[j] = better ? den : best->den[j];
        best->a[j] = better ? a : best->a[j];
        best->b[j] = better ? b : best->b[j];
    }
}

static void octahedral_search(const octahedral_direction *p, const octahedral_candidates *u,
                              const octahedral_candidates *w, uint32_t width, octahedral_best *best)
{
    for (uint32_t a = 0; a < width; a++)
        for (uint32_t b = 0; b < width; b++)
            octahedral_try(p, u->level[a], w->level[b], (int32_t)a, (int32_t)b, best);
}

static void octahedral_search_all(const kvant_triplet_book *book, const octahedral_direction *p,
                                  octahedral_best *best)
{
    uint32_t n = 1u << book->direction_bits;
    for (uint32_t a = 0; a < n; a++)
        for (uint32_t b = 0; b < n; b++) {
            float u[OCTAHEDRAL_LANES], w[OCTAHEDRAL_LANES];
            for (uint32_t j = 0; j < OCTAHEDRAL_LANES; j++) {
                u[j] = book->direction[a];
                w[j] = book->direction[b];
            }
            octahedral_try(p, u, w, (int32_t)a, (int32_t)b, best);
        }
}

static void octahedral_store_direction(const kvant_triplet_book *book,
                                       const octahedral_direction *p, const octahedral_best *best,
                                       const int32_t *first_u, const int32_t *first_w, uint32_t at,
                                       kvant_triplets *t)
{
    int32_t last = (int32_t)(1u << book->direction_bits) - 1;
    for (uint32_t j = 0; j < OCTAHEDRAL_LANES; j++) {
        int32_t u = first_u[j] + best->a[j], w = first_w[j] + best->b[j];
        u = u < 0 ? 0 : u > last ? last : u;
        w = w < 0 ? 0 : w > last ? last : w;
        t->code[at + j] = (uint32_t)u | (uint32_t)w << book->direction_bits;
        t->along[at + j] = p->length[j] * best->dot[j] / sqrtf(best->den[j]);
    }
}

/* Chooses the norm's level. With joint rounding it is the level nearest to the triplet's projection
 * on its coded direction, which minimises the error (section 3.5 of the paper). With the paper's
 * scalar rounding it is the level nearest to the triplet's norm. */
static void octahedral_store_norm(const kvant_triplet_book *book, uint32_t at, kvant_triplets *t)
{
    float target[OCTAHEDRAL_LANES];
    int32_t index[OCTAHEDRAL_LANES];
    for (uint32_t j = 0; j < OCTAHEDRAL_LANES; j++) {
        float x = t->x[at + j], y = t->y[at + j], z = t->z[at + j];
        float norm = sqrtf(x * x + y * y + z * z);
        target[j] = book->rounding == KVANT_ROUND_SCALAR ? norm : t->along[at + j];
    }
    octahedral_count(book->norm_thresholds, 1u << book->norm_bits, target, index);
    for (uint32_t j = 0; j < OCTAHEDRAL_LANES; j++) {
        t->norm[at + j] = book->norm[index[j]];
        t->code[at + j] |= (uint32_t)index[j] << (2 * book->direction_bits);
    }
}

KVANT_LOOP KVANT_TRIPLET_CODES_FN(NAME(triplet_codes))
{
    for (uint32_t at = 0; at < n; at += OCTAHEDRAL_LANES) {
        octahedral_direction p;
        octahedral_candidates u = { .first = { 0 } }, w = { .first = { 0 } };
        octahedral_best best;
        for (uint32_t j = 0; j < OCTAHEDRAL_LANES; j++) {
            best.quality[j] = -4; /* lower than every possible quality times den */
            best.den[j] = 1;
        }
        octahedral_project(t, at, &p);
        if (book->rounding == KVANT_ROUND_FULL) {
            octahedral_search_all(book, &p, &best);
        } else {
            uint32_t width = book->rounding == KVANT_ROUND_NEXT ? 2 : (uint32_t)book->rounding;
            octahedral_near(book, p.u, &u);
            octahedral_near(book, p.w, &w);
            octahedral_narrow(p.u, book->rounding, &u);
            octahedral_narrow(p.w, book->rounding, &w);
            octahedral_search(&p, &u, &w, width, &best);
        }
        octahedral_store_direction(book, &p, &best, u.first, w.first, at, t);
        octahedral_store_norm(book, at, t);
    }
}
