/* The token entries of the hosted APIs' JSON, read in one pass: see hosted_scan.py, which compiles and calls this.

Guarantees: no byte outside of [body, body + size) is read, and nothing behind the ends of the arrays is written, whatever the bytes are;
time is linear in them. A list of entries is taken as a whole or left where it stands. Of a number either the float32 is found that a
reader of doubles gives after rounding, or its place is noted. Gives up: entries with other keys, texts for tokens, alternatives, ids of
more than 9 digits; whoever calls leaves them to the codec. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t byte;

/* What has been found so far, and where there is room for more. */
typedef struct {
    int32_t *ids;
    float *logprobs;
    int64_t entries, most_entries;
    int64_t (*turns)[3]; /* where the first entry begins, where the last one ends, how many entries there are with it */
    int64_t turn_count, most_turns;
    int64_t (*odd)[3]; /* an entry whose number is left to others, where it begins and ends */
    int64_t odd_count, most_odd;
} found_t;

static const double POWERS[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

/* A string literal without its last byte, where there is room for it. */
#define IS(at, end, text) ((end) - (at) >= (int64_t)sizeof(text) - 1 && memcmp(at, text, sizeof(text) - 1) == 0)

static inline int digit(const byte *at, const byte *end) { return at < end && (byte)(*at - '0') < 10; }

static inline int is(const byte *at, const byte *end, byte wanted) { return at < end && *at == wanted; }

static inline const byte *space(const byte *at, const byte *end) {
    while (at < end && *at <= ' ' && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')) at++;
    return at;
}

/* Eight digits at once; 0 where there are not so many. */
static inline int eight(const byte *at, const byte *end, uint64_t *value) {
    uint64_t x;
    if (end - at < 8) return 0;
    x = (uint64_t)at[0] | (uint64_t)at[1] << 8 | (uint64_t)at[2] << 16 | (uint64_t)at[3] << 24 | (uint64_t)at[4] << 32 |
        (uint64_t)at[5] << 40 | (uint64_t)at[6] << 48 | (uint64_t)at[7] << 56;
    if (((x & 0xF0F0F0F0F0F0F0F0) ^ 0x3030303030303030) | (((x & 0x0F0F0F0F0F0F0F0F) + 0x0606060606060606) & 0xF0F0F0F0F0F0F0F0)) return 0;
    x = (x & 0x0F0F0F0F0F0F0F0F) * 2561 >> 8;
    x = (x & 0x00FF00FF00FF00FF) * 6553601 >> 16;
    *value = (x & 0x0000FFFF0000FFFF) * 42949672960001 >> 32;
    return 1;
}

/* Digits from `at` on into a mantissa of at most 19 that count; others are counted in `digits` only. */
static inline const byte *mantissa(const byte *at, const byte *end, uint64_t *value, int *digits) {
    uint64_t more;
    if (*value == 0)
        while (is(at, end, '0')) at++;
    for (; *digits <= 11 && eight(at, end, &more); at += 8, *digits += 8) *value = *value * 100000000 + more;
    for (; digit(at, end); at++) {
        if (*digits < 19) *value = *value * 10 + (uint64_t)(*at - '0');
        if (*digits < 20) ++*digits;
    }
    return at;
}

/* A JSON number; NULL where there is none. `known` says whether its value could be told. */
static const byte *number(const byte *at, const byte *end, float *value, int *known) {
    const byte *first, *point;
    uint64_t whole = 0;
    int64_t exponent = 0, written = 0;
    int digits = 0, integer = 1, negative = is(at, end, '-');
    if (negative) at++;
    first = at;
    at = mantissa(at, end, &whole, &digits);
    if (at == first || (*first == '0' && at - first > 1)) return NULL;
    if (is(at, end, '.')) {
        integer = 0;
        point = ++at;
        at = mantissa(at, end, &whole, &digits);
        if (at == point) return NULL;
        exponent = point - at;
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        int minus;
        integer = 0;
        at++;
        minus = is(at, end, '-');
        if (minus || is(at, end, '+')) at++;
        first = at;
        for (; digit(at, end); at++)
            if (written < 100000) written = written * 10 + (*at - '0');
        if (at == first) return NULL;
        exponent += minus ? -written : written;
    }
    *known = 0;
    if (whole == 0) {
        *known = !(negative && integer); /* what -0 is, readers disagree on */
        *value = negative ? -0.0F : 0.0F;
    } else if (digits <= 19 && exponent >= -44 && exponent <= 22) {
        double near = (double)whole;
        float low, high;
        if (exponent < -22) near /= POWERS[22], exponent += 22;
        near = exponent < 0 ? near / POWERS[-exponent] : near * POWERS[exponent];
        /* Three roundings at most, each by 2^-53 of the value: the double that a careful reader finds lies between these. */
        low = (float)(near * (1 - 0x1p-50)), high = (float)(near * (1 + 0x1p-50));
        *known = low == high && low >= FLT_MIN && high < 1e38F;
        *value = negative ? -low : low;
    }
    return at;
}

/* A list of numbers that nobody reads; NULL where it is none. */
static const byte *numbers(const byte *at, const byte *end) {
    at = space(at, end);
    if (is(at, end, ']')) return at + 1;
    for (;;) {
        const byte *first = at;
        while (digit(at, end)) at++;
        if (at == first || (*first == '0' && at - first > 1) || at == end) return NULL;
        if (*at != ',' && *at != ']') at = space(at, end);
        if (is(at, end, ']')) return at + 1;
        if (!is(at, end, ',')) return NULL;
        at++;
        if (!digit(at, end)) at = space(at, end);
    }
}

/* The digits of a token's id, up to behind the quote. */
static inline const byte *id(const byte *at, const byte *end, int32_t *value) {
    const byte *first = at;
    int32_t read = 0;
    for (; digit(at, end) && at - first < 9; at++) read = read * 10 + (*at - '0');
    *value = read;
    return at > first && is(at, end, '"') ? at + 1 : NULL;
}

static inline const byte *logprob(const byte *body, const byte *first, const byte *end, found_t *found) {
    float *value = &found->logprobs[found->entries];
    const byte *at;
    int known;
    if (IS(first, end, "null")) {
        *value = NAN;
        return first + 4;
    }
    if ((at = number(first, end, value, &known)) == NULL) return NULL;
    if (!known) {
        int64_t *odd = found->odd[found->odd_count];
        if (found->odd_count == found->most_odd) return NULL;
        odd[0] = found->entries, odd[1] = first - body, odd[2] = at - body;
        found->odd_count++;
    }
    return at;
}

static const byte *colon(const byte *at, const byte *end) {
    at = space(at, end);
    return is(at, end, ':') ? space(at + 1, end) : NULL;
}

/* An entry as servers write it, without white space and in one of two orders, from behind its brace; NULL where it is otherwise. */
static inline const byte *compact(const byte *body, const byte *at, const byte *end, found_t *found) {
    int64_t odd_count = found->odd_count;
    if (!IS(at, end, "\"token\":\"token_id:") || (at = id(at + 18, end, &found->ids[found->entries])) == NULL) return NULL;
    if (IS(at, end, ",\"bytes\":[")) { /* OpenAI's client */
        if ((at = numbers(at + 10, end)) == NULL || !IS(at, end, ",\"logprob\":")) return NULL;
        if ((at = logprob(body, at + 11, end, found)) == NULL) return NULL;
    } else { /* vLLM */
        if (!IS(at, end, ",\"logprob\":") || (at = logprob(body, at + 11, end, found)) == NULL) return NULL;
        if (!IS(at, end, ",\"bytes\":[") || (at = numbers(at + 10, end)) == NULL) goto otherwise;
    }
    if (IS(at, end, ",\"top_logprobs\":[]}")) return at + 19;
otherwise:
    found->odd_count = odd_count;
    return NULL;
}

enum { TOKEN = 1, LOGPROB = 2, BYTES = 4, TOP = 8 };

/* What stands behind an entry's brace, up to behind the closing one; NULL where it is not as it mostly is. */
static const byte *entry(const byte *body, const byte *at, const byte *end, found_t *found) {
    int seen = 0;
    for (;;) {
        int key;
        at = space(at, end);
        if (IS(at, end, "\"token\"")) {
            key = TOKEN;
            if ((at = colon(at + 7, end)) == NULL || !IS(at, end, "\"token_id:")) return NULL;
            if ((at = id(at + 10, end, &found->ids[found->entries])) == NULL) return NULL;
        } else if (IS(at, end, "\"logprob\"")) {
            key = LOGPROB;
            if ((at = colon(at + 9, end)) == NULL || (at = logprob(body, at, end, found)) == NULL) return NULL;
        } else if (IS(at, end, "\"bytes\"")) {
            key = BYTES;
            if ((at = colon(at + 7, end)) == NULL) return NULL;
            if (IS(at, end, "null")) at += 4;
            else if (!is(at, end, '[') || (at = numbers(at + 1, end)) == NULL) return NULL;
        } else if (IS(at, end, "\"top_logprobs\"")) {
            key = TOP;
            if ((at = colon(at + 14, end)) == NULL) return NULL;
            if (IS(at, end, "null")) at += 4;
            else if (!is(at, end, '[') || !is(at = space(at + 1, end), end, ']')) return NULL;
            else at++;
        } else {
            return NULL;
        }
        if (seen & key) return NULL; /* of two the last one counts, for those who read it */
        seen |= key;
        at = space(at, end);
        if (is(at, end, '}')) break;
        if (!is(at, end, ',')) return NULL;
        at++;
    }
    if ((seen & (TOKEN | LOGPROB)) != (TOKEN | LOGPROB)) return NULL;
    return at + 1;
}

/* Entries from the first one's brace on; behind the last one's, or NULL. */
static const byte *list(const byte *body, const byte *at, const byte *end, found_t *found) {
    for (;;) {
        const byte *behind;
        if (!is(at, end, '{') || found->entries == found->most_entries) return NULL;
        if ((behind = compact(body, at + 1, end, found)) == NULL && (behind = entry(body, at + 1, end, found)) == NULL) return NULL;
        found->entries++;
        at = space(behind, end);
        if (is(at, end, ']')) return behind;
        if (!is(at, end, ',')) return NULL;
        at = space(at + 1, end);
    }
}

/* All lists of entries of a body; returns how many, and writes to `counts` how many entries and odd numbers they have. */
int64_t headrace_hosted_scan(const byte *body, int64_t size, int32_t *ids, float *logprobs, int64_t most_entries, int64_t (*turns)[3],
                             int64_t most_turns, int64_t (*odd)[3], int64_t most_odd, int64_t counts[2]) {
    const byte *at = body, *end = body + size;
    found_t found = {ids, logprobs, 0, most_entries, turns, 0, most_turns, odd, 0, most_odd};
    while (found.turn_count < most_turns && (at = memchr(at, '"', (size_t)(end - at))) != NULL) {
        const byte *first, *behind;
        found_t before = found;
        if (!IS(at, end, "\"content\"") || (first = colon(at + 9, end)) == NULL || !is(first, end, '[')) {
            at++;
            continue;
        }
        first = space(first + 1, end);
        if ((behind = list(body, first, end, &found)) == NULL) {
            found = before; /* left where it stands */
            at++;
            continue;
        }
        found.turns[found.turn_count][0] = first - body;
        found.turns[found.turn_count][1] = behind - body;
        found.turns[found.turn_count][2] = found.entries;
        found.turn_count++;
        at = behind;
    }
    counts[0] = found.entries;
    counts[1] = found.odd_count;
    return found.turn_count;
}
