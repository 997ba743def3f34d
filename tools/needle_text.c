/* needle_text.c - see needle_text.h. */
#include "needle_text.h"

#include "command.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define MAX_SENTENCE 400 /* bytes; a longer one of the user's text is cut there */

static const char intro[] = "The following text hides some secret numbers.\n\n";

static const char *const cities[NEEDLE_MAX] = { "Lisbon", "Oslo",   "Nairobi", "Quito",  "Hanoi",
                                                "Prague", "Cairo",  "Lima",    "Dublin", "Kyoto",
                                                "Accra",  "Riga",   "Bogota",  "Vienna", "Dakar",
                                                "Perth",  "Naples", "Havana",  "Zagreb", "Tunis",
                                                "Boston", "Malaga", "Odessa",  "Geneva" };

/* The parts of the sentences between needles when the user gives no text. */
static const char *const who[] = { "The old gardener",      "A travelling clerk",
                                   "My neighbour's sister", "The night porter",
                                   "One of the twins",      "The ferry captain",
                                   "A retired teacher",     "The baker" };
static const char *const did[] = { "repaired",  "painted", "forgot about", "measured",
                                   "described", "sold",    "admired",      "moved" };
static const char *const what[] = { "a wooden gate",     "the blue bicycle", "two empty barrels",
                                    "an iron stove",     "the garden table", "a broken clock",
                                    "some wet blankets", "a box of nails" };
static const char *const when[] = { "before the rain began",     "on a quiet afternoon",
                                    "while the radio played",    "as soon as the snow melted",
                                    "without telling anyone",    "for the third time that week",
                                    "because nobody else would", "long after supper" };

typedef struct source {
    const char *haystack, *at; /* at: where the next sentence begins; NULL haystack: made here */
    uint32_t random;
} source;

static uint32_t next_random(source *s, uint32_t below)
{
    s->random = s->random * 1664525u + 1013904223u;
    return (s->random >> 8) % below;
}

static void make_sentence(source *s, char *out)
{
    const uint32_t a = next_random(s, COUNT(who)), b = next_random(s, COUNT(did)),
                   c = next_random(s, COUNT(what)), d = next_random(s, COUNT(when));
    snprintf(out, MAX_SENTENCE, "%s %s %s %s. ", who[a], did[b], what[c], when[d]);
}

static bool ends_sentence(const char *p)
{
    return *p == '\n' || (strchr(".!?", *p) != NULL && (p[1] == ' ' || p[1] == '\n' || p[1] == 0));
}

/* Goes back to the beginning of the user's text at its end. */
static void take_sentence(source *s, char *out)
{
    size_t n = 0;
    s->at += strspn(s->at, " \t\r\n");
    if (*s->at == 0)
        s->at = s->haystack + strspn(s->haystack, " \t\r\n");
    while (s->at[n] != 0 && n < MAX_SENTENCE - 2 && !ends_sentence(s->at + n))
        n++;
    if (s->at[n] != 0 && s->at[n] != '\n')
        n++;
    while (n > 0 && ((unsigned char)s->at[n] & 0xc0) == 0x80) /* not within a character of UTF-8 */
        n--;
    memcpy(out, s->at, n);
    memcpy(out + n, " ", 2);
    s->at += n > 0 ? n : 1;
}

static bool start_source(source *s, const char *haystack, uint32_t seed)
{
    *s = (source){ .haystack = haystack, .at = haystack, .random = seed * 2654435761u + 1 };
    if (haystack == NULL)
        return true;
    const size_t bytes = strlen(haystack);
    if (strspn(haystack, " \t\r\n") == bytes)
        return complain("needle: the text is empty");
    char skipped[MAX_SENTENCE];
    s->at += (size_t)next_random(s, 1u << 16) * bytes >> 16;
    take_sentence(s, skipped); /* the rest of one that was begun in the middle */
    return true;
}

typedef struct builder {
    const engine *engine;
    needle_text *text;
    size_t room;
} builder;

/* Adds the tokens of a string; *fits tells whether they fitted. */
static bool append(builder *b, const char *string, token_kind kind, bool *fits)
{
    size_t n = 0;
    llama_token *tokens = engine_tokenize(b->engine, string, strlen(string), kind, &n);
    if (tokens == NULL)
        return false;
    *fits = n <= b->room - b->text->n_tokens;
    if (*fits) {
        memcpy(b->text->tokens + b->text->n_tokens, tokens, n * sizeof *tokens);
        b->text->n_tokens += n;
    }
    free(tokens);
    return true;
}

/* The tokens of the answer are those that a question without it does not begin with. */
static bool make_question(const engine *e, needle *one, const char *city, uint32_t number)
{
    char question[96], answered[128];
    size_t n = 0, n_answered = 0, same = 0;
    snprintf(question, sizeof question, "\nThe secret number of %s is", city);
    snprintf(answered, sizeof answered, "%s %u", question, (unsigned)number);
    llama_token *a = engine_tokenize(e, question, strlen(question), TOKENS_PART, &n),
                *b = engine_tokenize(e, answered, strlen(answered), TOKENS_PART, &n_answered);
    const bool ok = a != NULL && b != NULL && n_answered > 1 && n_answered <= NEEDLE_TOKENS;
    while (ok && same < n && same + 1 < n_answered && a[same] == b[same])
        same++;
    if (ok) {
        memcpy(one->question, b, n_answered * sizeof *b);
        one->n_question = same;
        one->n_answer = n_answered - same;
    } else {
        complain("needle: the model's vocabulary cannot spell the question");
    }
    free(a);
    free(b);
    return ok && same > 0;
}

static bool hide_needle(builder *b, source *s, const char *city)
{
    char sentence[128];
    const uint32_t number = 10000 + next_random(s, 90000);
    bool fits = false;
    snprintf(sentence, sizeof sentence, "\nThe secret number of %s is %u.\n", city,
             (unsigned)number);
    if (!append(b, sentence, TOKENS_PART, &fits) ||
        !make_question(b->engine, &b->text->needles[b->text->n_needles], city, number))
        return false;
    b->text->n_needles++;
    if (!fits)
        complain("needle: a context of %zu tokens is too short for all needles",
                 b->room + NEEDLE_TOKENS);
    return fits;
}

/* Sentences up to n_tokens of the text. */
static bool fill(builder *b, source *s, size_t n_tokens)
{
    bool fits = true;
    while (fits && b->text->n_tokens < n_tokens) {
        char sentence[MAX_SENTENCE];
        if (s->haystack != NULL)
            take_sentence(s, sentence);
        else
            make_sentence(s, sentence);
        if (!append(b, sentence, TOKENS_PART, &fits))
            return false;
    }
    return true;
}

/* The cities in an order of the seed's. */
static void shuffle(source *s, const char **order)
{
    for (uint32_t i = 0; i < NEEDLE_MAX; i++)
        order[i] = cities[i];
    for (uint32_t i = NEEDLE_MAX - 1; i > 0; i--) {
        const uint32_t j = next_random(s, i + 1);
        const char *city = order[i];
        order[i] = order[j];
        order[j] = city;
    }
}

bool needle_text_make(needle_text *text, const engine *e, const char *haystack, size_t n_tokens,
                      size_t n_needles, uint32_t seed)
{
    source s;
    const char *order[NEEDLE_MAX];
    *text = (needle_text){ .n_tokens = 0 };
    if (n_tokens <= 2 * NEEDLE_TOKENS || n_needles == 0 || n_needles > NEEDLE_MAX ||
        !start_source(&s, haystack, seed))
        return false;
    builder b = { e, text, n_tokens - NEEDLE_TOKENS };
    text->tokens = malloc(b.room * sizeof *text->tokens);
    if (text->tokens == NULL)
        return complain("needle: out of memory");
    shuffle(&s, order);
    bool ok = false;
    if (!append(&b, intro, TOKENS_TEXT, &ok))
        return false;
    for (size_t i = 0; i < n_needles && ok; i++)
        ok = fill(&b, &s, (2 * i + 1) * b.room / (2 * n_needles)) && hide_needle(&b, &s, order[i]);
    return ok && fill(&b, &s, b.room);
}

void needle_text_free(needle_text *text)
{
    free(text->tokens);
    *text = (needle_text){ .n_tokens = 0 };
}
