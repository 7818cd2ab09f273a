// SPDX-License-Identifier: Apache-2.0
// One pass over the pattern, construct by construct; what is not known is refused.
#include "services/text/pattern.h"

#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/status_macros.h"
#include "services/text/unicode_additions.h"

namespace isthmus::text {
namespace {

constexpr size_t kMaxPatternBytes = 4096;
// Bounded repeats multiply the compiled size; tokenizers count digits, never hundreds.
constexpr int kMaxRepeat = 64;

class Translator {
 public:
  explicit Translator(absl::string_view pattern) : pattern_(pattern) {}

  absl::StatusOr<std::string> Run() {
    while (at_ < pattern_.size()) ISTHMUS_RETURN_IF_ERROR(Construct());
    return std::move(out_);
  }

 private:
  absl::Status Refuse(absl::string_view what) const {
    return absl::UnimplementedError(absl::StrCat("regex construct ", what, " at byte ", at_, " of ",
                                                 pattern_.size(), " is not supported"));
  }
  bool Has(absl::string_view text) const { return pattern_.substr(at_, text.size()) == text; }
  void Copy(size_t bytes) {
    absl::StrAppend(&out_, pattern_.substr(at_, bytes));
    at_ += bytes;
  }

  absl::Status Construct() {
    const char c = pattern_[at_];
    switch (c) {
      case '\\':
        return Escape();
      case '[':
        return Class();
      case '(':
        return Group();
      case '{':
        return Repeat();
      case '?':
      case '*':
      case '+':
        Copy(1);
        // `+?` is lazy and `++` possessive in both dialects, but no tokenizer here uses them.
        if (Has("?") || Has("*") || Has("+") || Has("{")) return Refuse("of a repeated quantifier");
        return absl::OkStatus();
      case '.':
      case '^':
      case '$':
      case ']':
      case '}':
        return Refuse(absl::StrCat("'", std::string(1, c), "'"));
      default:
        Copy(1);
        return absl::OkStatus();
    }
  }

  absl::Status Group() {
    for (const absl::string_view open : {"(?:", "(?!", "(?="}) {
      if (Has(open)) {
        Copy(open.size());
        return absl::OkStatus();
      }
    }
    return Refuse(absl::StrCat("'", pattern_.substr(at_, 3), "'"));
  }

  // {m}, {m,} or {m,n}.
  absl::Status Repeat() {
    const size_t close = pattern_.find('}', at_);
    if (close == absl::string_view::npos) return Refuse("'{' without '}'");
    const absl::string_view body = pattern_.substr(at_ + 1, close - at_ - 1);
    int value = 0;
    size_t digits = 0;
    size_t commas = 0;
    for (const char c : body) {
      if (c == ',') {
        if (digits == 0) return Refuse("'{,'");
        ++commas;
        value = 0;
        continue;
      }
      if (!absl::ascii_isdigit(static_cast<unsigned char>(c))) return Refuse("'{' as a literal");
      value = value * 10 + (c - '0');
      if (value > kMaxRepeat) return Refuse(absl::StrCat("of more than ", kMaxRepeat, " repeats"));
      ++digits;
    }
    if (digits == 0 || commas > 1) return Refuse("'{' as a literal");
    Copy(body.size() + 2);
    // In Ruby's syntax `{1,3}+` repeats the repeat, in Perl's it is possessive.
    if (Has("?") || Has("*") || Has("+") || Has("{")) return Refuse("of a repeated quantifier");
    return absl::OkStatus();
  }

  // An escape with the same meaning inside and outside a class.
  absl::Status Escape() {
    if (at_ + 1 >= pattern_.size()) return Refuse("'\\' at the end");
    const char c = pattern_[at_ + 1];
    if (c == 's' || c == 'S') {
      // PCRE2 counts U+180E as white space in \s; Unicode and Oniguruma do not.
      out_.append(c == 's' ? "\\p{White_Space}" : "\\P{White_Space}");
      at_ += 2;
      return absl::OkStatus();
    }
    if (c == 'p' || c == 'P') return Property();
    if (c == 'r' || c == 'n' || c == 't' || absl::ascii_ispunct(static_cast<unsigned char>(c))) {
      Copy(2);
      return absl::OkStatus();
    }
    return Refuse(absl::StrCat("'\\", std::string(1, c), "'"));
  }

  // \p{L}: a general category by its letter, with the characters that PCRE2's tables may lack.
  absl::Status Property() {
    const bool is_negated = pattern_[at_ + 1] == 'P';
    const absl::string_view name = pattern_.substr(at_ + 2, 3);
    const bool is_known = name.size() == 3 && name[0] == '{' && name[2] == '}' &&
                          absl::string_view("LMNPSZ").find(name[1]) != absl::string_view::npos;
    if (!is_known) return Refuse(absl::StrCat("'", pattern_.substr(at_, 5), "'"));
    if (is_negated && in_class_) return Refuse("'\\P' in a class");
    if (!in_class_) out_.append(is_negated ? "[^" : "[");
    absl::StrAppend(&out_, "\\p", name);
    for (const CodePointRange& range : UnicodeAdditions(name[1])) {
      absl::StrAppendFormat(&out_, "\\x{%x}-\\x{%x}", static_cast<uint32_t>(range.first),
                            static_cast<uint32_t>(range.last));
    }
    if (!in_class_) out_.push_back(']');
    at_ += 5;
    return absl::OkStatus();
  }

  // [...] or [^...]; inside, `[`, `&&` and `^` other than first mean different things.
  absl::Status Class() {
    Copy(1);
    in_class_ = true;
    if (Has("^")) Copy(1);
    if (Has("]")) return Refuse("of an empty class");
    while (at_ < pattern_.size()) {
      if (Has("&&")) return Refuse("'&&' in a class");
      const char c = pattern_[at_];
      if (c == ']') {
        Copy(1);
        in_class_ = false;
        return absl::OkStatus();
      }
      if (c == '\\') {
        ISTHMUS_RETURN_IF_ERROR(Escape());
      } else if (c == '[') {
        return Refuse("'[' in a class");
      } else {
        Copy(1);
      }
    }
    return Refuse("of a class without ']'");
  }

  const absl::string_view pattern_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::string out_;
};

}  // namespace

absl::StatusOr<std::string> TranslatePattern(absl::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("pattern has ", pattern.size(), " bytes, limit ", kMaxPatternBytes));
  }
  return Translator(pattern).Run();
}

}  // namespace isthmus::text
