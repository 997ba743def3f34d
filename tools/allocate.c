/* allocate.c - see allocate.h. */
#include "allocate.h"

static const allocate_choice *current(const allocate_site *s)
{
    return &s->choices[s->chosen];
}

static allocate_total add_up(const allocate_site *sites, size_t n_sites)
{
    allocate_total total = { 0, 0 };
    for (size_t i = 0; i < n_sites; i++) {
        total.bytes += current(&sites[i])->bytes;
        total.loss += current(&sites[i])->loss;
    }
    return total;
}

/* Of the smallest choices the best. */
static void choose_smallest(allocate_site *s)
{
    s->chosen = 0;
    for (size_t c = 1; c < s->n_choices; c++) {
        const allocate_choice *x = &s->choices[c], *best = current(s);
        if (x->bytes < best->bytes || (x->bytes == best->bytes && x->loss < best->loss))
            s->chosen = c;
    }
}

/* The next corner of the hull: of all larger choices the one that saves most for each byte. n_choices when there is none. */
static size_t next_corner(const allocate_site *s, double *slope)
{
    const allocate_choice *now = current(s);
    size_t best = s->n_choices;
    *slope = 0;
    for (size_t c = 0; c < s->n_choices; c++) {
        const allocate_choice *x = &s->choices[c];
        if (x->bytes <= now->bytes || x->loss >= now->loss)
            continue;
        const double saved = (now->loss - x->loss) / (x->bytes - now->bytes);
        if (saved > *slope) {
            *slope = saved;
            best = c;
        }
    }
    return best;
}

void allocate_start(allocate_site *sites, size_t n_sites)
{
    for (size_t i = 0; i < n_sites; i++)
        choose_smallest(&sites[i]);
}

bool allocate_step(allocate_site *sites, size_t n_sites, double left)
{
    size_t site = n_sites, choice = 0;
    double best = 0;
    for (size_t i = 0; i < n_sites; i++) {
        double slope;
        const size_t c = next_corner(&sites[i], &slope);
        if (c < sites[i].n_choices && slope > best &&
            sites[i].choices[c].bytes - current(&sites[i])->bytes <= left) {
            best = slope;
            site = i;
            choice = c;
        }
    }
    if (site == n_sites)
        return false;
    sites[site].chosen = choice;
    return true;
}

/* Corners in the order of what they save: the Lagrangian's path from the smallest choices on, as far as the budget goes. A corner
 * that does not fit ends its own site's path alone. */
static void climb(allocate_site *sites, size_t n_sites, double budget)
{
    while (allocate_step(sites, n_sites, budget - add_up(sites, n_sites).bytes)) {}
}

typedef struct move {
    size_t site, choice;
} move;

typedef struct exchange {
    move a, b; /* b.site is n_sites when one site alone changes */
    double gain;
} exchange;

/* Gains below this share of the loss are rounding, and could go round in circles. */
#define LEAST_GAIN 1e-12

/* The best second move beside a first one that costs bytes and gains loss. */
static void try_second(const allocate_site *sites, size_t n_sites, move a, double bytes, double gain, double left,
                       exchange *best)
{
    if (bytes <= left && gain > best->gain)
        *best = (exchange){ a, { n_sites, 0 }, gain };
    for (size_t j = 0; j < n_sites; j++) {
        for (size_t d = 0; d < sites[j].n_choices && j != a.site; d++) {
            const allocate_choice *y = &sites[j].choices[d], *now = current(&sites[j]);
            const double total_gain = gain + now->loss - y->loss;
            if (total_gain > best->gain && bytes + y->bytes - now->bytes <= left)
                *best = (exchange){ a, { j, d }, total_gain };
        }
    }
}

static bool improve(allocate_site *sites, size_t n_sites, double budget)
{
    const allocate_total total = add_up(sites, n_sites);
    exchange best = { { n_sites, 0 }, { n_sites, 0 }, LEAST_GAIN * total.loss };
    for (size_t i = 0; i < n_sites; i++) {
        for (size_t c = 0; c < sites[i].n_choices; c++) {
            const allocate_choice *x = &sites[i].choices[c], *now = current(&sites[i]);
            if (x->loss < now->loss) /* of two moves one gains; it is looked at first */
                try_second(sites, n_sites, (move){ i, c }, x->bytes - now->bytes, now->loss - x->loss,
                           budget - total.bytes, &best);
        }
    }
    if (best.a.site == n_sites)
        return false;
    sites[best.a.site].chosen = best.a.choice;
    if (best.b.site < n_sites)
        sites[best.b.site].chosen = best.b.choice;
    return true;
}

bool allocate(allocate_site *sites, size_t n_sites, double budget, allocate_total *total)
{
    allocate_start(sites, n_sites);
    const bool possible = add_up(sites, n_sites).bytes <= budget;
    if (possible) {
        climb(sites, n_sites, budget);
        while (improve(sites, n_sites, budget)) {}
    }
    *total = add_up(sites, n_sites);
    return possible;
}
