/* allocate.h - picks one choice per site, so that the sum of losses is least within a budget of
 * bytes.
 *
 * Knows nothing of codecs. The solution is exact on the convex hulls (Lagrange). Then single and
 * paired exchanges repair it: no change of one or two sites that fits the budget improves the
 * result. Deterministic: ties go to the earlier site and choice.
 */
#ifndef KVANT_TOOLS_ALLOCATE_H
#define KVANT_TOOLS_ALLOCATE_H

#include <stdbool.h>
#include <stddef.h>

typedef struct allocate_choice {
    double bytes, loss; /* finite, not below 0 */
} allocate_choice;

typedef struct allocate_site {
    const allocate_choice *choices;
    size_t n_choices; /* at least 1 */
    size_t chosen;    /* result */
} allocate_site;

typedef struct allocate_total {
    double bytes, loss;
} allocate_total;

/* False when even the smallest choices exceed the budget; they are chosen then, so that the total
 * says what is needed. */
bool allocate(allocate_site *sites, size_t n_sites, double budget, allocate_total *total);

/* The same path by hand: every site at its smallest choice, then one step after another, each the
 * change of one site that saves most for each byte and takes at most left bytes more. False when
 * there is none. */
void allocate_start(allocate_site *sites, size_t n_sites);
bool allocate_step(allocate_site *sites, size_t n_sites, double left);

#endif /* KVANT_TOOLS_ALLOCATE_H */
