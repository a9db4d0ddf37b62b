#include "evidence/canonical.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <set>

#include "coord/temp_dir.h"
#include "holdfast/coord/evidence/bundle.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

const std::string kGolden = HOLDFAST_GOLDEN;

BundleManifest golden_manifest() {
  BundleManifest manifest;
  EXPECT_TRUE(
      google::protobuf::TextFormat::ParseFromString(read_file(kGolden + "/manifest.textproto"), &manifest));
  return manifest;
}

TEST(CanonicalTest, TheFormIsPinnedByteForByte) {
  std::string golden = read_file(kGolden + "/manifest.canonical");
  ASSERT_FALSE(golden.empty());
  EXPECT_EQ(canonical_manifest(golden_manifest()) + "\n", golden);
  golden.pop_back();
  EXPECT_EQ(
      evidence_content_id(sha256(golden)),
      "training-incident-evidence@sha256:480e93d861222d12adcd8619e2a15ec955360bed23b68a458924de264f8c1c28");
}

// Calls `visit(message, field)` for each field that is present, at any depth.
template <typename Visit>
void each_field(Message* message, Visit visit) {
  std::vector<const FieldDescriptor*> fields;
  message->GetReflection()->ListFields(*message, &fields);
  for (const FieldDescriptor* field : fields) {
    visit(message, field);
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      each_field(message->GetReflection()->MutableMessage(message, field), visit);
      continue;
    }
    for (int i = 0; i < message->GetReflection()->FieldSize(*message, field); ++i) {
      each_field(message->GetReflection()->MutableRepeatedMessage(message, field, i), visit);
    }
  }
}

TEST(CanonicalTest, EveryFieldThatThereIsIsInTheGoldenManifest) {
  BundleManifest manifest = golden_manifest();
  std::set<std::string> seen;
  each_field(&manifest, [&](Message*, const FieldDescriptor* field) { seen.insert(field->full_name()); });
  const auto* file = BundleManifest::descriptor()->file();
  for (int i = 0; i < file->message_type_count(); ++i) {
    // What wraps a manifest, and what travels.
    if (file->message_type(i) == BundleFile::descriptor() ||
        file->message_type(i) == RankEvidence::descriptor())
      continue;
    for (int j = 0; j < file->message_type(i)->field_count(); ++j) {
      EXPECT_TRUE(seen.contains(file->message_type(i)->field(j)->full_name()))
          << file->message_type(i)->field(j)->full_name();
    }
  }
}

TEST(CanonicalTest, AFieldThatIsMissingChangesIt) {
  const std::string whole = canonical_manifest(golden_manifest());
  BundleManifest manifest = golden_manifest();
  std::set<std::string> forms = {whole};
  std::size_t fields = 0;
  each_field(&manifest, [&](Message* message, const FieldDescriptor* field) {
    const std::unique_ptr<Message> before(message->New());
    before->CopyFrom(*message);
    message->GetReflection()->ClearField(message, field);
    forms.insert(canonical_manifest(manifest));
    ++fields;
    message->CopyFrom(*before);
  });
  EXPECT_GT(fields, 80u);
  EXPECT_EQ(forms.size(), fields + 1);
}

TEST(CanonicalTest, NumbersKeepEveryBit) {
  BundleManifest manifest;
  const auto form_of = [&](double loss) {
    manifest.set_loss(loss);
    return canonical_manifest(manifest);
  };
  EXPECT_EQ(form_of(0.0), R"({"loss":"0x0000000000000000"})");
  EXPECT_EQ(form_of(-0.0), R"({"loss":"0x8000000000000000"})");
  EXPECT_EQ(form_of(std::numeric_limits<double>::infinity()), R"({"loss":"0x7ff0000000000000"})");
  EXPECT_EQ(form_of(std::bit_cast<double>(0x7ff8000000000001)), R"({"loss":"0x7ff8000000000001"})");
}

TEST(CanonicalTest, AbsentAndDefaultDiffer) {
  BundleManifest manifest;
  EXPECT_EQ(canonical_manifest(manifest), "{}");
  manifest.set_loss_scale(1);
  manifest.set_time("");
  EXPECT_EQ(canonical_manifest(manifest), R"({"loss_scale":"0x3ff0000000000000","time":""})");
}

TEST(CanonicalTest, TwoTimesOfOneIncidentHaveTwoForms) {
  BundleManifest manifest = golden_manifest();
  const std::string first = canonical_manifest(manifest);
  manifest.set_time("2026-11-29T16:23:27.623Z");
  EXPECT_NE(canonical_manifest(manifest), first);
}

}  // namespace
}  // namespace holdfast
