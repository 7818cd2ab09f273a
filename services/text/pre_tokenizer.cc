// SPDX-License-Identifier: Apache-2.0
// Split stages with PCRE2.
#include "services/text/pre_tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/status_macros.h"
#include "services/text/pattern.h"

namespace isthmus::text {
namespace {

// A match of a tokenizer pattern needs a few steps per byte; more is a pattern gone wild.
constexpr size_t kMatchStepsBase = 2'000;
constexpr size_t kMatchStepsPerByte = 30;
constexpr uint32_t kHeapLimitKib = 64 * 1024;
constexpr size_t kJitStackStartBytes = size_t{32} * 1024;
constexpr size_t kJitStackMaxBytes = size_t{8} * 1024 * 1024;

struct FreeCode {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct FreeMatch {
  void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
};
struct FreeContext {
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};
struct FreeStack {
  void operator()(pcre2_jit_stack* stack) const { pcre2_jit_stack_free(stack); }
};
using Code = std::unique_ptr<pcre2_code, FreeCode>;

std::string Pcre2Message(int code) {
  PCRE2_UCHAR buffer[256];
  if (pcre2_get_error_message(code, buffer, sizeof(buffer)) < 0) return absl::StrCat("code ", code);
  return reinterpret_cast<const char*>(buffer);
}

absl::StatusOr<Code> CompileStage(const std::string& pattern, bool jit) {
  ISTHMUS_ASSIGN_OR_RETURN(const std::string translated, TranslatePattern(pattern));
  int error = 0;
  PCRE2_SIZE offset = 0;
  Code code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                          PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset,
                          nullptr));
  if (code == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("regex rejected at byte ", offset, " of its ",
                                                   translated.size(), ": ", Pcre2Message(error)));
  }
  uint32_t matches_empty = 0;
  pcre2_pattern_info(code.get(), PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0) return absl::UnimplementedError("regex can match the empty text");
  // Where machine code cannot be had (no executable memory), pcre2_match interprets instead.
  if (jit) pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
  return code;
}

}  // namespace

struct PreTokenizer::Stages {
  std::vector<Code> codes;
};

namespace {

// The state of one Split call: PCRE2 wants its own per thread, and making one is cheap.
class Matcher {
 public:
  Matcher()
      : context_(pcre2_match_context_create(nullptr)),
        stack_(pcre2_jit_stack_create(kJitStackStartBytes, kJitStackMaxBytes, nullptr)),
        match_(pcre2_match_data_create(1, nullptr)) {
    pcre2_set_heap_limit(context_.get(), kHeapLimitKib);
    pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
  }

  absl::Status SplitPiece(const pcre2_code* code, absl::string_view piece,
                          std::vector<absl::string_view>* pieces) {
    const size_t steps = kMatchStepsBase + kMatchStepsPerByte * piece.size();
    pcre2_set_match_limit(context_.get(), static_cast<uint32_t>(steps));
    size_t gap = 0;
    size_t from = 0;
    while (from < piece.size()) {
      // The caller has checked the text once; checking it per match would be quadratic.
      const int count = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(piece.data()), piece.size(),
                                    from, PCRE2_NO_UTF_CHECK, match_.get(), context_.get());
      if (count == PCRE2_ERROR_NOMATCH) break;
      if (count < 0) {
        return absl::InvalidArgumentError(absl::StrCat("text of ", piece.size(),
                                                       " bytes cannot be split at byte ", from,
                                                       ": ", Pcre2Message(count)));
      }
      const PCRE2_SIZE* const bounds = pcre2_get_ovector_pointer(match_.get());
      const size_t begin = bounds[0];
      const size_t end = bounds[1];
      if (begin > gap) pieces->push_back(piece.substr(gap, begin - gap));
      pieces->push_back(piece.substr(begin, end - begin));
      gap = end;
      from = end;
    }
    if (gap < piece.size()) pieces->push_back(piece.substr(gap));
    return absl::OkStatus();
  }

 private:
  std::unique_ptr<pcre2_match_context, FreeContext> context_;
  std::unique_ptr<pcre2_jit_stack, FreeStack> stack_;
  std::unique_ptr<pcre2_match_data, FreeMatch> match_;
};

}  // namespace

PreTokenizer::PreTokenizer(std::unique_ptr<Stages> stages) : stages_(std::move(stages)) {}
PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;
PreTokenizer& PreTokenizer::operator=(PreTokenizer&&) noexcept = default;
PreTokenizer::~PreTokenizer() = default;

absl::StatusOr<PreTokenizer> PreTokenizer::Create(const std::vector<std::string>& patterns,
                                                  bool jit) {
  auto stages = std::make_unique<Stages>();
  for (const std::string& pattern : patterns) {
    ISTHMUS_ASSIGN_OR_RETURN(Code code, CompileStage(pattern, jit));
    stages->codes.push_back(std::move(code));
  }
  return PreTokenizer(std::move(stages));
}

absl::Status PreTokenizer::Split(absl::string_view text,
                                 std::vector<absl::string_view>* pieces) const {
  if (text.empty()) return absl::OkStatus();
  Matcher matcher;
  std::vector<absl::string_view> before = {text};
  std::vector<absl::string_view> after;
  for (const Code& code : stages_->codes) {
    after.clear();
    for (const absl::string_view piece : before) {
      ISTHMUS_RETURN_IF_ERROR(matcher.SplitPiece(code.get(), piece, &after));
    }
    before.swap(after);
  }
  pieces->insert(pieces->end(), before.begin(), before.end());
  return absl::OkStatus();
}

}  // namespace isthmus::text
