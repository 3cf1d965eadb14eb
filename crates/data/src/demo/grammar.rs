//! The grammar of the demo language: small stories that cannot be predicted well without long-range context.
//!
//! A verb agrees with its subject in number and class, across adjectives, places and relative clauses that hold other
//! nouns. A sentence that opens with a name must come back to that name at its end, past any other name in between:
//! "Ada gives a small bell to Ben , who thanks Ada ." The next is likely to be about Ada again.
//! Adjectives, places and joined clauses repeat geometrically.

use super::automaton::{Automaton, Transition};
use super::words::Class::{self, Animal, Thing};
use super::words::Number::{self, Many, One};
use super::words::WHOLE;
use super::words::WordCategory::{
    self, Adjective, Adverb, Ask, Auxiliary, Comma, Determiner, Give, Join, Name, Noun, Place, Preposition,
    Question, React, Report, So, Start, Stop, Thank, That, To, Transitive, Verb, Who,
};

/// Everything the rest of a text depends on; the tokens so far determine it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GrammarState {
    /// The subject of the last sentence that opened with a name.
    hero: Option<usize>,
    /// How the sentence must end.
    ending: Ending,
    /// The subject still waiting for its verb.
    subject: Option<(Class, Number)>,
    /// What comes next.
    next: Next,
}

/// How a sentence must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Ending {
    /// With a full stop.
    Plain,
    /// With a question mark.
    Asked,
    /// With the name it opened with, which is the hero's.
    Recall,
}

/// What a noun phrase is in its sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Role {
    /// Has the verb.
    Subject,
    /// Where the subject is: "near the hills".
    Location,
    /// The object of a relative clause: "that sees a cat".
    Rival,
    /// The object of the verb.
    Object,
    /// What is given.
    Gift,
}

/// A position in a sentence, named by what comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Next {
    Text,
    Sentence,
    NameVerb,
    ReportedThat,
    Auxiliary,
    /// `Some` if an auxiliary already determines singular or plural.
    Determiner(Role, Option<Number>),
    /// `Some` if the determiner already determines singular or plural.
    Noun(Role, Option<Number>),
    Verb,
    RelativeVerb,
    Adverb,
    ClauseEnd,
    So,
    ReactingName,
    Reaction,
    GiftTo,
    Recipient,
    GiftComma,
    Who,
    Thanks,
    ThankedName,
    FullStop,
}

/// The grammar as a table.
pub(super) fn automaton() -> Automaton {
    let start = GrammarState { hero: None, ending: Ending::Plain, subject: None, next: Next::Text };
    Automaton::new(start, GrammarState::expand)
}

/// The transitions out of a state, while they are being collected.
#[derive(Default)]
struct Transitions(Vec<Transition<GrammarState>>);

impl Transitions {
    /// Any word of a category; `weight` is divided among them.
    fn any(&mut self, weight: u64, category: WordCategory, next: GrammarState) {
        for (token, share) in (category.first_token()..).zip(category.shares()) {
            self.0.push(Transition { token, weight: weight * share, next });
        }
    }

    /// One name.
    fn name(&mut self, weight: u64, name: usize, next: GrammarState) {
        let token = Name.first_token() + name as u32;
        self.0.push(Transition { token, weight: weight * WHOLE, next });
    }
}

impl GrammarState {
    fn at(self, next: Next) -> GrammarState {
        GrammarState { next, ..self }
    }

    /// All transitions out of a state, with their weights.
    fn expand(self) -> Vec<Transition<GrammarState>> {
        let mut transitions = Transitions::default();
        match self.next {
            Next::Text => transitions.any(1, Start, self.at(Next::Sentence)),
            Next::Sentence => self.open(&mut transitions),
            Next::NameVerb => {
                transitions.any(3, Report, self.at(Next::ReportedThat));
                transitions.any(2, Give, self.at(Next::Determiner(Role::Gift, None)));
            }
            Next::ReportedThat => transitions.any(1, That, self.at(Next::Determiner(Role::Subject, None))),
            Next::Auxiliary => {
                for number in [One, Many] {
                    transitions.any(
                        1,
                        Auxiliary(number),
                        self.at(Next::Determiner(Role::Subject, Some(number))),
                    );
                }
            }
            Next::Determiner(role, number) => self.determine(1, role, number, &mut transitions),
            Next::Noun(role, number) => self.add_noun(role, number, &mut transitions),
            Next::Verb => self.qualify_or_act(&mut transitions),
            Next::RelativeVerb => {
                let (_, number) = self.subject.expect("a relative clause follows a subject");
                transitions.any(1, Transitive(number), self.at(Next::Determiner(Role::Rival, None)));
            }
            Next::Adverb => {
                transitions.any(1, Adverb, self.at(Next::ClauseEnd));
                self.end_clause(&mut transitions);
            }
            Next::ClauseEnd => self.end_clause(&mut transitions),
            Next::So => transitions.any(1, So, self.at(Next::ReactingName)),
            Next::ReactingName => transitions.name(1, self.named(), self.at(Next::Reaction)),
            Next::Reaction => transitions.any(1, React, self.at(Next::FullStop)),
            Next::GiftTo => transitions.any(1, To, self.at(Next::Recipient)),
            Next::Recipient => {
                for name in (0..Name.words().len()).filter(|&name| name != self.named()) {
                    transitions.name(1, name, self.at(Next::GiftComma));
                }
            }
            Next::GiftComma => transitions.any(1, Comma, self.at(Next::Who)),
            Next::Who => transitions.any(1, Who, self.at(Next::Thanks)),
            Next::Thanks => transitions.any(1, Thank, self.at(Next::ThankedName)),
            Next::ThankedName => transitions.name(1, self.named(), self.at(Next::FullStop)),
            Next::FullStop => transitions.any(1, Stop, self.after_sentence()),
        }
        transitions.0
    }

    /// A statement, a question, or a sentence about somebody, most often the hero.
    fn open(self, transitions: &mut Transitions) {
        self.determine(4, Role::Subject, None, transitions);
        transitions.any(12, Ask, GrammarState { ending: Ending::Asked, ..self.at(Next::Auxiliary) });
        for name in 0..Name.words().len() {
            let weight = self.hero.map_or(8, |hero| if hero == name { 36 } else { 4 });
            let next = GrammarState { hero: Some(name), ending: Ending::Recall, ..self.at(Next::NameVerb) };
            transitions.name(weight, name, next);
        }
    }

    /// A determiner, which may fix the number: "a", "some"; or leave it to the noun: "the".
    fn determine(self, weight: u64, role: Role, number: Option<Number>, transitions: &mut Transitions) {
        transitions.any(2 * weight, Determiner(None), self.at(Next::Noun(role, number)));
        for fixed in numbers(number) {
            transitions.any(weight, Determiner(Some(fixed)), self.at(Next::Noun(role, Some(fixed))));
        }
    }

    /// Another adjective, or the noun.
    fn add_noun(self, role: Role, number: Option<Number>, transitions: &mut Transitions) {
        transitions.any(2, Adjective, self);
        for number in numbers(number) {
            match role {
                Role::Subject => {
                    for (weight, class) in [(3, Animal), (2, Thing)] {
                        let next = GrammarState { subject: Some((class, number)), ..self.at(Next::Verb) };
                        transitions.any(weight, Noun(class, number), next);
                    }
                }
                Role::Location => transitions.any(4, Place(number), self.at(Next::Verb)),
                Role::Rival => transitions.any(4, Noun(Animal, number), self.at(Next::Verb)),
                Role::Object => transitions.any(4, Noun(Thing, number), self.at(Next::Adverb)),
                Role::Gift => transitions.any(4, Noun(Thing, number), self.at(Next::GiftTo)),
            }
        }
    }

    /// More about the subject, or its verb.
    fn qualify_or_act(self, transitions: &mut Transitions) {
        let (class, number) = self.subject.expect("a verb follows a subject");
        let done = GrammarState { subject: None, ..self };
        // After "does" and "do" the verb has its plain form, which is also its plural.
        let form = if self.ending == Ending::Asked { Many } else { number };
        transitions.any(2, Preposition, self.at(Next::Determiner(Role::Location, None)));
        transitions.any(5, Verb(class, form), done.at(Next::Adverb));
        if class == Animal {
            transitions.any(1, That, self.at(Next::RelativeVerb));
            transitions.any(3, Transitive(form), done.at(Next::Determiner(Role::Object, None)));
        }
    }

    /// Another clause, or the way this sentence must end.
    fn end_clause(self, transitions: &mut Transitions) {
        match self.ending {
            Ending::Plain => transitions.any(3, Stop, self.after_sentence()),
            Ending::Asked => return transitions.any(1, Question, self.after_sentence()),
            Ending::Recall => transitions.any(3, Comma, self.at(Next::So)),
        }
        transitions.any(1, Join, self.at(Next::Determiner(Role::Subject, None)));
    }

    fn named(self) -> usize {
        self.hero.expect("the sentence opened with a name")
    }

    /// Between two sentences only the hero is remembered.
    fn after_sentence(self) -> GrammarState {
        GrammarState { ending: Ending::Plain, ..self.at(Next::Sentence) }
    }
}

/// The numbers still possible.
fn numbers(fixed: Option<Number>) -> impl Iterator<Item = Number> {
    [One, Many].into_iter().filter(move |&number| fixed.is_none_or(|fixed| fixed == number))
}
