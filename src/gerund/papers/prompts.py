"""Instructions that Look Both Ways and MAGNET put before texts: `--prompts lbw` and `--prompts magnet`."""

from gerund.evaluation.registry import STS, PromptSet

_TWENTY = "TwentyNewsgroupsClustering"

# Appendix B, table 3, and how its released code puts them before a text. That code puts the instruction of the two
# re-ranking tasks before their documents too: titles and questions like those that are asked.
LBW = PromptSet(
    {
        "ArguAna": "Given a claim, find documents that refute the claim.",
        "NFCorpus": "Given a question, retrieve relevant documents that best answer the question.",
        "SciFact": "Given a scientific claim, retrieve documents that support or refute the claim.",
        "SciDocsRR": "Given a title of a scientific paper, retrieve the titles of other relevant papers.",
        "StackOverflowDupQuestions": "Retrieve duplicate questions from StackOverflow forum.",
        "BiorxivClusteringS2S": "Identify the main category of Biorxiv papers based on the titles.",
        "MedrxivClusteringS2S": "Identify the main category of Medrxiv papers based on the titles.",
        # Not in the paper's table though among its tasks: the instruction of its source (Wang et al., 2023), which
        # is MAGNET's as well.
        _TWENTY: "Identify the topic or theme of the given news articles.",
        "SprintDuplicateQuestions": "Retrieve duplicate questions from Sprint forum.",
        "Banking77Classification": "Given an online banking query, find the corresponding intents.",
        "EmotionClassification": (
            "Classify the emotion expressed in the given Twitter message into one of the six emotions: anger, fear, "
            "joy, love, sadness, and surprise."
        ),
        "MassiveIntentClassification": "Given a user utterance as query, find the user intents.",
        STS: "Retrieve semantically similar text.",
    },
    "Instruct: {}\nQuery: ",
    documents=("SciDocsRR", "StackOverflowDupQuestions"),
)

# Appendix E, table 8. The paper does not say how they stand before a text; its one instruction in training ("Given
# the sentence, find its representation:") and LLM2Vec, which it builds on, end with a colon.
MAGNET = PromptSet(
    {
        STS: "Retrieve semantically similar text",
        "BiorxivClusteringP2P": "Identify the main category of Biorxiv papers based on the titles and abstracts",
        "BiorxivClusteringS2S": "Identify the main category of Biorxiv papers based on the titles",
        _TWENTY: "Identify the topic or theme of the given news articles",
        "MedrxivClusteringP2P": "Identify the main category of Medrxiv papers based on the titles and abstracts",
        "MedrxivClusteringS2S": "Identify the main category of Medrxiv papers based on the titles",
    },
    "{}: ",
)
